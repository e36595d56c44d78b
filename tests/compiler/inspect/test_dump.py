"""Dumps: which files, readable, the same bytes for the same compilation, and times only where they belong."""

import ast
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
from sidestream.compiler.build_program import build_program
from sidestream.compiler.inspect.dump import dump
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pass_records import PassRecord, graph_lines, op_counts, pass_table, refusals, text_of
from sidestream.compiler.program.program import Bucket, Program
from sidestream.ops.core.registry import OPS
from support.fx_graphs import GraphBuilder
from torch import fx

aten = torch.ops.aten
BF16 = torch.bfloat16


def model() -> fx.GraphModule:
    build = GraphBuilder()
    x, adapter_index = build.input("input_ids", ("T",), torch.int64), build.input("adapter_index", ("T",), torch.int32)
    lens = build.input("context_lens", ("B",), torch.int32)
    build.call(aten.relu.default, build.input("query_start", ("B+1",), torch.int32))
    norm = build.weight("norm", (32,), BF16)
    hidden = build.call(OPS["embedding"], x, build.weight("table", (64, 32), BF16))
    normed = build.call(OPS["rms_norm_quant"], hidden, norm, 1e-5, True)
    kept, scale = build.pick(normed, 0), build.pick(normed, 2)
    base = build.call(aten.mul.Tensor, hidden, build.call(aten.unsqueeze.default, scale, -1))
    a, b = build.weight("a", (2, 16, 32), BF16, "adapter"), build.weight("b", (2, 32, 16), BF16, "adapter")
    delta = build.call(OPS["lora"], kept, a, b, adapter_index, [32], side=True)
    joined = build.call(aten.add.Tensor, base, delta)
    clamped = build.call(aten.clamp.default, joined, float("-inf"), 4.0)
    return build.finish(
        build.call(aten.view.default, clamped, [build.call(aten.sym_size.int, x, 0), 4, 8]),
        build.call(aten.neg.default, lens),
    )


def records(module: fx.GraphModule, seconds: float = 0.5) -> list[PassRecord]:
    text, counts = text_of(graph_lines(module)), op_counts(module)
    before = text.replace("sidestream.lora(", "aten.bmm.default(")
    fewer = {**{name: count for name, count in counts.items() if name != "sidestream.lora"}, "aten.bmm.default": 2}
    return [
        PassRecord("normalize", "keeps", 0, [], fewer, fewer, before, before, seconds),
        PassRecord(
            "lift_lora", "keeps", 1, ["unsqueeze_3 is also used by mul_10"], fewer, counts, before, text, seconds * 2
        ),
    ]


def program(lora: bool = True) -> Program:
    return build_program(model(), Bucket(6, 6, 16, 4, decode=True, lora=lora))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def test_all_files_of_the_design_are_there(tmp_path: Path) -> None:
    written = dump(tmp_path, records(model()), [program()], options=CompileOptions())
    expected = {
        "00_normalize.before.py",
        "00_normalize.after.py",
        "00_normalize.diff",
        "01_lift_lora.before.py",
        "01_lift_lora.after.py",
        "01_lift_lora.diff",
        "passes.txt",
        "rejected.txt",
        "summary.txt",
        "summary.json",
        "timings.json",
        "index.html",
        "program.txt",
        "program.json",
        "schedule.svg",
        "trace.json",
    }
    assert {path.name for path in written} == expected == set(contents(tmp_path))


def test_the_same_compilation_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder, seconds in (("a", 0.5), ("b", 0.7)):
        dump(tmp_path / folder, records(model(), seconds), [program(), program(lora=False)], options=CompileOptions())
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first.keys() == second.keys() and "decode_t6_b6_p4_base/program.txt" in first
    assert {name for name in first if first[name] != second[name]} == {"timings.json"}
    assert json.loads(first["timings.json"])["passes"] == {"normalize": 0.5, "lift_lora": 1.0}


def test_files_of_passes_that_are_gone_are_removed(tmp_path: Path) -> None:
    dump(tmp_path, records(model()))
    (tmp_path / "notes.txt").write_text("mine")
    dump(tmp_path, records(model())[:1])
    assert "01_lift_lora.after.py" not in contents(tmp_path) and "notes.txt" in contents(tmp_path)


def test_the_saved_program_can_be_loaded(tmp_path: Path) -> None:
    dump(tmp_path, [], [program()])
    assert Program.decoded((tmp_path / "program.json").read_bytes()) == program()
    assert "No pass refused anything" in (tmp_path / "rejected.txt").read_text()


def test_graphs_are_python_with_named_dimensions() -> None:
    text = text_of(graph_lines(model()))
    tree = ast.parse(text)
    assert isinstance(tree.body[0], ast.FunctionDef) and [argument.arg for argument in tree.body[0].args.args][:2] == [
        "input_ids",
        "adapter_index",
    ]
    for line in (
        "    input_ids,  # i64[T]  input",
        "    query_start,  # i32[B+1]  input",
        "    norm,  # bf16[32]  weight = model.norm",
        "    rms_norm_quant_default = sidestream.rms_norm_quant(embedding_default, norm, 1e-05, True)  # (bf16[T, "
        "32], e4m3[T, 32], f32[T])",
        "    getitem = rms_norm_quant_default[0]  # bf16[T, 32]",
        "    clamp_default = aten.clamp.default(add_tensor, float('-inf'), 4.0)  # f32[T, 32]",
    ):
        assert line in text.splitlines(), text
    assert "side stream, 25% of the SMs" in text


def test_counts_leave_out_what_costs_no_kernel() -> None:
    counts = op_counts(model())
    assert counts["sidestream.lora"] == 1 and counts["aten.neg.default"] == 1
    assert not any("view" in name or "getitem" in name or "sym_size" in name for name in counts)
    assert list(counts) == sorted(counts)


def test_what_is_refused_in_each_layer_is_said_once() -> None:
    layers = [f"silu_{layer} is also used by mul_{3 * layer}" for layer in range(32)]
    record = PassRecord("fuse_silu_mul", "keeps", 0, [*layers, "silu has no product"], {}, {}, "", "", 0.0)
    assert refusals([record]).splitlines() == [
        "fuse_silu_mul: silu_0 is also used by mul_0  x 32",
        "fuse_silu_mul: silu has no product",
    ]


def test_the_pass_table_fits_a_terminal() -> None:
    found = {f"sidestream.op_{number}": number + 1 for number in range(30)}
    record = PassRecord("fuse_rope_append", "quantizes", 1024, [], {"aten.add.Tensor": 100000}, found, "", "", 0.0)
    table = pass_table([record])
    assert max(map(len, table.splitlines())) <= 100
    assert all(name in table for name in found) and "-100000 aten.add.Tensor" in table


def test_pass_table_and_refusals_read_well(tmp_path: Path) -> None:
    dump(tmp_path, records(model()), [program()], options=CompileOptions())
    line = pass_table(records(model())).splitlines()[-1]
    assert line.split()[:4] == ["lift_lora", "keeps", "1", "1"] and "-2 aten.bmm.default, +1 sidestream.lora" in line
    assert (tmp_path / "rejected.txt").read_text() == "lift_lora: unsqueeze_3 is also used by mul_10\n"
    assert "+    lora_default = sidestream.lora(" in (tmp_path / "01_lift_lora.diff").read_text()
    assert (tmp_path / "00_normalize.diff").read_text() == ""
    assert "lora_lowering = 'auto'" in (tmp_path / "summary.txt").read_text()


def test_program_text_shows_lanes_waits_and_memory(tmp_path: Path) -> None:
    dump(tmp_path, [], [program()])
    text = (tmp_path / "program.txt").read_text()
    (lora,) = [line for line in text.splitlines() if "sidestream.lora " in line]
    assert " side " in lora and "bf16[6, 32]" in lora and " 33 " in lora
    assert "model.table" in text and "arena" in text


def test_the_picture_has_a_box_a_step_and_an_arrow_a_wait(tmp_path: Path) -> None:
    made = program()
    dump(tmp_path, [], [made])
    root = ElementTree.fromstring((tmp_path / "schedule.svg").read_text())
    classes = [element.get("class") for element in root.iter()]
    assert classes.count("box") == len(made.steps)
    assert classes.count("wait") == sum(len(step.waits) for step in made.steps) > 0
    assert classes.count("lane") == 2
