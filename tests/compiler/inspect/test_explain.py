"""What `explain` says agrees with the programs; what a change would do has the right sign; passes of one's own show
up everywhere.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import sidestream
import torch
from sidestream.compiler.cost.bytes_and_flops import Assumptions
from sidestream.compiler.cost.estimate import estimate, floor_seconds, total_seconds
from sidestream.compiler.cost.hardware import H100
from sidestream.compiler.graph.capture import Captured
from sidestream.compiler.graph.nodes import is_call
from sidestream.compiler.inspect.compare_dumps import read_dump
from sidestream.compiler.inspect.explain import (
    as_text,
    changes_as_text,
    compare_changes,
    explain,
    explain_program,
    what_ifs,
)
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.passes import Context, PassReport
from sidestream.compiler.pipeline import PASSES, insert_pass
from sidestream.ops.attention.rope import rope_angles
from support.captured import capture_once
from support.meta_model import DECODE, DECODE_BASE, MIXED, compiled_llama, meta_llama
from torch import fx


def test_a_programs_figures_agree_with_its_steps() -> None:
    program = compiled_llama().program(DECODE)
    facts = explain_program(program, Assumptions(context=128, adapters=2))
    assert (
        facts["steps"]
        == len(program.steps)
        == facts["main"] + facts["side"]
        == sum(row["steps"] for row in facts["ops"])
    )
    assert (facts["context"], facts["adapters"], facts["layers"]) == (128, 2, 2)
    assert facts["estimated_us"] == pytest.approx(1e6 * total_seconds(estimate(program, Assumptions(128, 2))))
    assert facts["floor_us"] == pytest.approx(1e6 * floor_seconds(program, Assumptions(128, 2)))
    path = facts["critical_path"]
    parts = [path[name] for name in ("launch_and_latency_us", "bytes_us", "flops_us", "lanes_wait_us")]
    assert sum(parts) == pytest.approx(facts["estimated_us"]) and min(parts) >= 0
    assert sum(row["critical_us"] for row in facts["ops"]) == pytest.approx(facts["estimated_us"])
    inner = [
        step
        for step in program.steps
        if ".layers.1." in str([program.recipes.get(view.buffer) for view in step.inputs()])
    ]
    assert sum(facts["kernels_of_a_layer"].values()) >= len(inner) > 8 and facts["kernels_of_a_layer"]["side"] == 8


def test_values_are_json_and_the_text_names_what_matters() -> None:
    llama = compiled_llama()
    facts = explain(llama.options, llama.records, [llama.program(DECODE), llama.program(MIXED)], gpu=H100)
    assert json.loads(json.dumps(facts))["gpu"]["name"] == "H100"
    text = as_text(facts, compiled_llama().records)
    for wanted in (
        "pack_projections",
        DECODE.name,
        MIXED.name,
        "floor",
        "not measured",
        "linear_8bit",
        "launch and latency",
        "4 adapters in the batch",
    ):
        assert wanted in text
    assert max(map(len, text.splitlines())) <= 100
    assert compiled_llama().explain([DECODE]).startswith(compiled_llama().report())


@cache
def captured_once(dtype: torch.dtype) -> tuple[Captured, list[str]]:
    model = meta_llama(1, dtype=dtype)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return capture_once(model, model.example_inputs(), model.dynamic_shapes()), names


def capture(options: CompileOptions) -> tuple[Captured, list[str]]:
    captured, names = captured_once(options.model_dtype)
    return captured.copy(), names


def test_changes_are_found_and_point_the_right_way() -> None:
    seconds = what_ifs(capture, CompileOptions(), DECODE)
    changes = {change.change: change for change in compare_changes(seconds)}
    assert changes["no adapter in the batch"].difference < 0
    for slower in (
        "lora_lowering=serial",
        "pdl=False",
        "precision=bf16",
        "without lift_lora",
        "without pack_projections",
    ):
        assert changes[slower].difference > 0, slower
    assert not any("auto" in change or "check_counts" in change or "normalize" in change for change in changes)
    ordered = [change.difference for change in compare_changes(seconds)]
    assert ordered == sorted(ordered)
    table = changes_as_text(list(changes.values()), seconds[""], DECODE.name)
    assert "without pack_projections" in table and max(map(len, table.splitlines())) <= 100


def test_a_graph_can_be_copied_before_passes_rewrite_it() -> None:
    captured, names = capture(CompileOptions())
    before = len(captured.graph_module.graph.nodes)
    copy = captured.copy()
    made = sidestream.compiler.api.optimize(copy, CompileOptions(), names)
    assert made.records and len(captured.graph_module.graph.nodes) == before > len(copy.graph_module.graph.nodes)


def angles_apart(graph: fx.Graph, context: Context) -> PassReport:
    report = PassReport(0, ["embedding: is not an angle"])
    for node in graph.nodes:
        if is_call(node, rope_angles):
            node.meta.update(stream="side", sm_share=0.25)
            report.matches += 1
    return report


def test_a_pass_of_ones_own_shows_up_everywhere(tmp_path: Path) -> None:
    compiled = sidestream.compile(
        meta_llama(), passes=insert_pass(angles_apart, after="lift_rope_angles", tier="lowers")
    )
    names = [record.name for record in compiled.records]
    assert names.index("angles_apart") == names.index("lift_rope_angles") + 1
    assert "angles_apart" in compiled.report() and "angles_apart" in compiled.explain([DECODE_BASE])
    program = compiled.program(DECODE_BASE)
    assert [step.op for step in program.steps if step.stream == "side"] == ["sidestream.rope_angles"]
    compiled.dump(tmp_path, [DECODE_BASE])
    assert (
        list(tmp_path.glob("*_angles_apart.diff"))
        and "angles_apart: embedding: is not an angle" in (tmp_path / "rejected.txt").read_text()
    )
    assert "angles_apart" in (tmp_path / "index.html").read_text()
    dumped = read_dump(tmp_path)
    assert dumped.passes["angles_apart"]["matches"] == 1 and dumped.passes["angles_apart"]["tier"] == "lowers"
    without = sidestream.compile(
        meta_llama(), CompileOptions(disable=("angles_apart",)), passes=insert_pass(angles_apart, before="lift_rope")
    )
    assert {step.stream for step in without.program(DECODE_BASE).steps} == {"main"}


def test_a_pass_goes_where_it_is_told() -> None:
    names = [each.name for each in insert_pass(angles_apart, before="normalize")]
    ours = [each.name for each in PASSES]
    assert names == ["angles_apart", *ours]
    assert [each.name for each in insert_pass(angles_apart, after=ours[-1])] == [*ours, "angles_apart"]


@pytest.mark.parametrize(("place", "message"), [
    ({}, "one of after=PASS and before=PASS"),
    ({"after": "normalize", "before": "lift_rope"}, "one of after=PASS and before=PASS"),
    ({"after": "lift_ropes"}, "can't be after 'lift_ropes'"),
    ({"before": "nothing"}, "can't be before 'nothing'"),
])  # fmt: skip
def test_a_place_that_there_is_not_is_refused(place: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        insert_pass(angles_apart, **place)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(OptionError, match="already"):
        insert_pass(angles_apart, after="normalize", passes=insert_pass(angles_apart, after="normalize"))
    with pytest.raises(OptionError, match="not a pass"):
        sidestream.compile(meta_llama(), CompileOptions(disable=("angles_apart",)))
