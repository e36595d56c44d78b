"""The layer bench's variants become the programs that their names promise."""

import pytest
from sidestream.tools.bench import layer as bench_layer
from sidestream.tools.bench.layer import Layers, Variant


def test_programs_are_what_the_variants_say(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    monkeypatch.setattr(bench_layer, "LLAMA_8B", {**bench_layer.LLAMA_8B, **small})
    monkeypatch.setattr(bench_layer, "VOCABULARY", 64)
    monkeypatch.setattr(bench_layer, "DEPTHS", (1,))
    layers = Layers(rank=16, slots=2, device="cpu")

    def steps(variant: Variant) -> list[tuple[str, str, int | None, bool]]:
        return [
            (step.op.removeprefix("sidestream."), step.stream, step.sm_budget, step.pdl)
            for step in layers.program(1, 3, variant).steps
        ]

    assert not any("lora" in op for op, *_ in steps(Variant("none")))
    assert {stream for _, stream, _, _ in steps(Variant("serial"))} == {"main"}
    side = steps(Variant("side_stream"))
    assert {stream for op, stream, _, _ in side if "lora" in op} == {"side"} and {
        budget for _, _, budget, _ in side
    } == {None}
    assert {budget for op, stream, budget, _ in steps(Variant("side_stream", 0.5)) if stream == "side"} == {66}
    assert not any(pdl for *_, pdl in steps(Variant("side_stream", pdl=False)))
    tensors = layers.tensors(1, 3, [0, 1, 1])
    assert {
        buffer.name for buffer in layers.program(1, 3, Variant("side_stream")).of_kind("input", "weight", "adapter")
    } <= set(tensors)
