"""The numerics ledger: passes that keep numerics add nothing, quantization is charged to the passes that quantize,
and a planted bug to its pass.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sidestream.compiler.graph.capture import Captured
from sidestream.compiler.graph.nodes import aten, bind, insert_call, is_call, set_operands
from sidestream.compiler.graph.recipe import scale
from sidestream.compiler.inspect.ledger import CAPTURE, DECODE, DECODE_LORA, PROGRAM, as_json, as_text, largest, ledger
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes import Context, PassReport
from sidestream.compiler.passes.fuse.pack_projections import pack_projections
from sidestream.compiler.pipeline import DECODE_PASSES, PASSES, Pass, insert_pass
from sidestream.ops.attention.paged_attention import paged_attention
from sidestream.ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant
from sidestream.ops.lora.expand import lora_expand
from support.captured import capture_once
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama
from torch import fx

CHUNKS = [Chunk(0, list(range(3, 33)), -1), Chunk(1, [7, 200, 31, 99, 4], 0), Chunk(2, list(range(150, 130, -1)), 1)]


# graph, inputs, weights, eager logits
Model = tuple[Captured, dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Model]:
    base = tiny_llama(tmp_path_factory.mktemp("ledger"))
    adapters = tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=12, use_rslora=True)])
    return {dtype: captured_model(base, adapters, dtype) for dtype in (torch.float32, torch.bfloat16)}


def captured_model(base: TinyBase, adapters: list[Path], dtype: torch.dtype) -> Model:
    model, _ = plain_model(base, adapters, dtype)
    inputs = PagedRunner(model, len(CHUNKS), blocks=1).inputs(CHUNKS)
    logits = torch.cat(PagedRunner(model, len(CHUNKS), blocks=1).step(CHUNKS))
    captured = capture_once(model, model.example_inputs(), model.dynamic_shapes())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return captured, {name: value for name, value in inputs.items() if name != "kv_caches"}, state, logits


def test_passes_that_keep_numerics_add_nothing_in_fp32(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, logits = models[torch.float32]
    text = captured.graph_module.graph.python_code("self").src
    rows = ledger(captured, CompileOptions(precision="fp32"), inputs, state, reference=logits)
    assert [row.name for row in rows] == [
        CAPTURE,
        *(each.name for each in PASSES),
        PROGRAM,
        *(each.name + DECODE for each in DECODE_PASSES),
    ]
    assert all(row.added < 1e-4 and row.total < 1e-4 and row.mean_kl < 1e-6 for row in rows), as_text(rows)
    assert sum(row.matches for row in rows) > 30 and any(row.added > 0 for row in rows), "the passes did nothing"
    assert captured.graph_module.graph.python_code("self").src == text, "the captured graph is the caller's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_fp8_the_error_is_charged_to_the_passes_that_quantize(
    models: dict[torch.dtype, Model], dtype: torch.dtype
) -> None:
    """What is left in fp32 rounds nothing, so that there nothing hides under the roundings of bf16."""
    captured, inputs, state, _ = models[dtype]
    rows = ledger(captured, CompileOptions(precision="fp8"), inputs, state)
    # nothing to balance here
    quantizing = [row for row in rows if row.tier == "quantizes" and row.matches and row.name != "balance_keys"]
    others = max(row.added for row in rows if row.tier != "quantizes")
    assert [row.name for row in quantizing] == ["quantize_kv", "quantize_linears"] and largest(
        rows
    ).name == "quantize_linears", as_text(rows)
    assert largest(rows).added > 2 * others and (dtype == torch.bfloat16 or quantizing[0].added > 2 * others), as_text(
        rows
    )
    assert all(row.worst_layer and row.worst_token is not None and row.mean_kl > 0 for row in quantizing), as_text(rows)


def test_a_pass_that_is_off_adds_nothing(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, _ = models[torch.float32]
    options = CompileOptions(precision="fp8", kv_dtype="bf16", disable=("quantize_linears",))
    found = as_json(ledger(captured, options, inputs, state))
    assert found["quantize_kv"] == 0.0 and "quantize_linears" not in found and max(found.values()) < 1e-4


def test_a_stream_in_another_form_is_compared_by_its_values(models: dict[torch.dtype, Model]) -> None:
    """`finer_residual` divides what is held by 16: that is no error of any layer."""
    captured, inputs, state, _ = models[torch.bfloat16]
    rows = ledger(captured, CompileOptions(precision="int8"), inputs, state)
    row = next(each for each in rows if each.name == "finer_residual")
    assert row.matches == 1 and 0 < row.added < 0.1, as_text(rows)
    assert row.worst_layer and 0 < row.growth < 0.1, as_text(rows)


def halve_a_scale(graph: fx.Graph, context: Context) -> PassReport:
    """A wrong scale: half of what it should be, for the down projection of layer 0."""
    found = [
        node
        for node in graph.nodes
        if node.op == "placeholder" and "layers_0" in node.name and node.name.endswith("down_proj_weight_scale")
    ]
    for node in found:
        node.meta["recipe"] = scale(node.meta["recipe"], 0.5)
    return PassReport(len(found))


def poison(graph: fx.Graph, context: Context) -> PassReport:
    """NaN in the second norm of layer 1."""
    node = [node for node in graph.nodes if is_call(node, add_rms_norm)][2]
    set_operands(node, eps=float("nan"))
    return PassReport(1)


def spoiled(graph: fx.Graph, context: Context) -> PassReport:
    """pack_projections, which also halves the softmax scale of layer 1."""
    report = pack_projections(graph, context)
    node = [node for node in graph.nodes if is_call(node, paged_attention)][1]
    set_operands(node, softmax_scale=bind(node).softmax_scale * 0.5)
    return report


def test_a_planted_wrong_scale_is_named_with_its_layer(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, _ = models[torch.bfloat16]
    rows = ledger(
        captured,
        CompileOptions(precision="fp8"),
        inputs,
        state,
        passes=insert_pass(halve_a_scale, after="quantize_linears"),
    )
    worst = largest(rows)
    assert (worst.name, worst.matches, worst.worst_layer) == ("halve_a_scale", 1, "layer 0 MLP"), as_text(rows)
    assert as_json(rows)["halve_a_scale"] == worst.added and not {CAPTURE, PROGRAM} & set(as_json(rows))
    assert "halve_a_scale" in as_text(rows) and "layer 0 MLP" in as_text(rows)


def test_a_scale_that_a_pass_of_the_list_spoils_is_named(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, _ = models[torch.float32]
    spoiled.__name__ = "pack_projections"
    passes = tuple(replace(each, run=spoiled) if each.name == "pack_projections" else each for each in PASSES)
    rows = ledger(captured, CompileOptions(precision="fp32"), inputs, state, passes=passes)
    assert (largest(rows).name, largest(rows).worst_layer) == ("pack_projections", "layer 1 attention"), as_text(rows)
    assert largest(rows).added > 100 * max(row.added for row in rows if row.name != "pack_projections")


def wrong_residual(graph: fx.Graph, context: Context) -> PassReport:
    """Half of the last norm's gain, in decode programs only."""
    node = [node for node in graph.nodes if is_call(node, add_rms_norm_quant)][-1]
    set_operands(node, eps=bind(node).eps + 1.0)
    return PassReport(1)


def test_a_fault_in_a_pass_of_decode_programs_is_named(
    models: dict[torch.dtype, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, inputs, state, _ = models[torch.bfloat16]
    monkeypatch.setattr(
        "sidestream.compiler.inspect.ledger.DECODE_PASSES", (*DECODE_PASSES, Pass(wrong_residual, "keeps"))
    )
    monkeypatch.setattr("sidestream.compiler.pipeline.DECODE_PASSES", (*DECODE_PASSES, Pass(wrong_residual, "keeps")))
    rows = ledger(captured, CompileOptions(precision="fp8"), inputs, state)
    found = {row.name: row for row in rows if row.name.endswith(DECODE)}
    assert list(found) == [*(each.name + DECODE for each in DECODE_PASSES), "wrong_residual" + DECODE] and not set(
        found
    ) & set(as_json(rows))
    assert found["fuse_quantize" + DECODE].matches == found["wrong_residual" + DECODE].matches == 1
    assert (
        found["fuse_quantize" + DECODE].added < 1e-2 and largest(list(found.values())).name == "wrong_residual" + DECODE
    ), as_text(rows)
    assert found["fuse_quantize" + DECODE].total < 0.3


def wrong_adapters(graph: fx.Graph, context: Context) -> PassReport:
    """B three times too large, in decode programs with LoRA only."""
    report = PassReport(0)
    for node in list(graph.nodes):
        if is_call(node, lora_expand):
            with graph.inserting_before(node):
                scale = insert_call(graph, aten.mul.Tensor, (bind(node).b_scale, 3.0), like=node)
                set_operands(node, b_scale=scale)
            report.matches += 1
    return report


def test_a_fault_with_adapters_is_named(models: dict[torch.dtype, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    captured, inputs, state, _ = models[torch.bfloat16]
    for module in ("inspect.ledger", "pipeline"):
        monkeypatch.setattr(
            f"sidestream.compiler.{module}.DECODE_PASSES", (*DECODE_PASSES, Pass(wrong_adapters, "keeps"))
        )
    rows = ledger(captured, CompileOptions(), inputs, state)
    found = {row.name: row for row in rows if row.name.endswith(DECODE_LORA)}
    assert list(found) == ["fuse_quantize" + DECODE_LORA, "wrong_adapters" + DECODE_LORA], as_text(rows)
    assert found["fuse_quantize" + DECODE_LORA].added < 0.03 < 0.1 < found["wrong_adapters" + DECODE_LORA].added, (
        as_text(rows)
    )
    assert "wrong_adapters" + DECODE not in {row.name for row in rows if row.matches} and not set(found) & set(
        as_json(rows)
    )


def test_nan_is_the_largest_error_of_all(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, _ = models[torch.float32]
    rows = ledger(
        captured, CompileOptions(precision="fp32"), inputs, state, passes=insert_pass(poison, after="fuse_add_rms_norm")
    )
    assert (largest(rows).name, largest(rows).worst_layer) == ("poison", "layer 1 MLP"), as_text(rows)


def test_totals_are_against_the_reference_that_is_given(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, logits = models[torch.float32]
    rows = ledger(captured, CompileOptions(precision="fp32"), inputs, state, passes=PASSES[:2], reference=logits * 1.25)
    assert all(row.total == pytest.approx(0.2, rel=1e-3) for row in rows)
    assert rows[0].added == rows[0].total and all(row.added < 1e-4 for row in rows[1:])


def test_a_missing_input_is_named(models: dict[torch.dtype, Model]) -> None:
    captured, inputs, state, _ = models[torch.float32]
    with pytest.raises(ValueError, match="'positions'"):
        ledger(
            captured,
            CompileOptions(precision="fp32"),
            {name: value for name, value in inputs.items() if name != "positions"},
            state,
        )
