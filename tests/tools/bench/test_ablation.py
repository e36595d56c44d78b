"""The ablation: each arm compiles, and what it turns off is gone from the programs that are timed."""

from typing import Any

import pytest
from sidestream.compiler.options import CompileOptions
from sidestream.tools.bench import ablation
from sidestream.tools.bench import layer as bench_layer

UNSEEN = {
    "without fuse_quantize",
    "without fuse_silu_mul",
    "without pack_projections",
    "without lift_rope_angles",
    "without fuse_add_rms_norm",
    "LoRA stacks in 16 bits",
    "no rotation of Q and K",
    "no rotation of activations",
    "everything in e4m3, adapters too",
    "linears in 16 bits",
}  # compiled elsewhere; each takes seconds here


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that would be timed; a program's time is its number of steps."""
    programs: list[Any] = []

    def layer_us(pair: dict[int, Any], _tensors: object, _repeats: int) -> float:
        programs.append(pair[max(pair)])
        return float(len(pair[max(pair)].steps))

    for module in (bench_layer, ablation):
        monkeypatch.setattr(module, "DEPTHS", (1,))
        monkeypatch.setattr(module, "layer_us", layer_us)
    everything = ablation.arms()
    monkeypatch.setattr(ablation, "arms", lambda: [arm for arm in everything if arm.name not in UNSEEN])
    monkeypatch.setattr(bench_layer.Layers, "tensors", lambda *_arguments: {})
    return programs


def test_each_arm_compiles_and_changes_what_it_says(timed: list[Any]) -> None:
    shown: list[ablation.Row] = []
    rows = ablation.ablate([8], rank=16, slots=2, repeats=1, on_row=shown.append, device="cpu")
    assert rows == shown and len(rows) == len(timed)
    assert [(row.arm, row.adapters > 0) for row in rows[:2]] == [("everything on", False), ("everything on", True)]
    assert all(row.added_us == 0 for row in rows[:2])
    programs = {(row.arm, row.adapters > 0): program for row, program in zip(rows, timed, strict=True)}
    ops = {key: [step.op for step in program.steps] for key, program in programs.items()}

    def has(arm: str, text: str, lora: bool = True) -> bool:
        return any(text in op for op in ops[arm, lora])

    assert any(step.pdl for step in programs["everything on", True].steps)
    assert not any(step.pdl for step in programs["no programmatic dependent launch", True].steps)
    assert has("everything on", "decoder_block", lora=False) and not has(
        "without fuse_decoder_block", "decoder_block", lora=False
    )
    assert has("everything on", "rope_append") and not has("without fuse_rope_append", "rope_append")
    assert not has("everything in 16 bits", "linear_8bit") and has("everything on", "linear_8bit")
    assert all(step.stream == "main" for step in programs["LoRA as serial", True].steps)
    assert any(step.stream == "side" for step in programs["LoRA as side_stream", True].steps)
    budgets = {step.sm_budget for step in programs["LoRA next to the base on 25% of the SMs", True].steps}
    assert len(budgets) > 1
    assert ("LoRA as serial", False) not in programs


def test_every_change_is_an_option_of_the_compiler() -> None:
    for arm in ablation.arms():
        CompileOptions(**arm.change)
