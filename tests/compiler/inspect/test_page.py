"""`index.html`: complete, self-contained, the same bytes for the same compilation, small enough, and measured times
only when asked for.
"""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sidestream.compiler.api import CompiledModel, compile_model
from sidestream.compiler.cost.kernel_resources import Resources
from sidestream.compiler.cost.timings import Timings, TimingsError
from sidestream.compiler.inspect.page.index_html import SCRIPTS, page_data, part, render
from sidestream.compiler.inspect.page.kernel_sources import kernel_sources
from sidestream.compiler.inspect.schedule_svg import COLOURS
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import EXPERT_PASSES, PASSES, with_expert_passes
from sidestream.graphs.lora import LoraShape
from sidestream.ops.core.registry import OPS
from sidestream.tools import cli
from support.dumped import DECODE, MIXED, compiled_on_meta, data_of, dumped_8b
from support.meta import FIELDS, compiled_without_weights
from support.meta_model import meta_llama
from support.sparse import sparse_model


@pytest.fixture(scope="module")
def compiled() -> CompiledModel:
    return compiled_on_meta(FIELDS, 2)


@pytest.fixture(scope="module")
def page(compiled: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return (compiled.dump(tmp_path_factory.mktemp("dump"), [DECODE, MIXED]) / "index.html").read_text()


@pytest.fixture(scope="module")
def data(page: str) -> dict[str, Any]:
    return data_of(page)


def test_every_pass_is_there_with_its_graphs(compiled: CompiledModel, data: dict[str, Any]) -> None:
    assert [each["name"] for each in data["passes"]] == [record.name for record in compiled.records]
    for shown, record, following in zip(data["passes"], compiled.records, [*data["passes"][1:], None], strict=True):
        assert shown["matches"] == record.matches and shown["rejected"] == record.rejected and shown["about"]
        assert following is None or following["before"] == shown["after"]
        for number, lines in ((shown["before"], record.lines_before), (shown["after"], record.lines_after)):
            texts = [data["lines"][line][0] for section in data["graphs"][number].values() for line in section]
            assert sorted(texts) == sorted(line.text for line in lines)
            assert set(data["graphs"][number]) == {"start", "0", "1", "end"}
    assert any(each["rejected"] for each in data["passes"])


def test_every_op_has_a_colour_in_both_themes_and_in_the_schedule(page: str, data: dict[str, Any]) -> None:
    families = {op.traits.family for op in OPS.values()}
    assert families <= set(COLOURS) and set(data["families"].values()) <= families
    assert all(len(re.findall(rf"--{family}: #[0-9a-f]{{6}}", page)) == 2 for family in families)
    assert data["families"]["sidestream.lora_shrink"] == "lora"


def test_equal_lines_are_stored_once(data: dict[str, Any]) -> None:
    assert len({tuple(line) for line in data["lines"]}) == len(data["lines"])
    used = [line for graph in data["graphs"] for section in graph.values() for line in section]
    assert len(used) > 2 * len(data["lines"]) and set(used) == set(range(len(data["lines"])))


@pytest.mark.parametrize(
    ("options", "off"),
    [
        (CompileOptions(), {"rotate_values": "rotate_values=False", "center_keys": "center_keys=False"}),
        (
            CompileOptions(precision="bf16", disable=("fuse_silu_mul", "fuse_decoder_block")),
            {
                "rotate_values": "rotate_values=False",
                "fuse_silu_mul": "disable_passes=fuse_silu_mul",
                "quantize_kv": "precision=bf16, kv_dtype=auto",
                "center_keys": "center_keys=False",
                "quantize_linears": "precision=bf16",
                "quantize_lora": "precision=bf16",
                "fuse_quantize": "precision=bf16",
            },
        ),
        (
            CompileOptions(lora_dtype="bf16", rotate_values=True, center_keys=True),
            {"quantize_lora": "precision=int8, lora_dtype=bf16"},
        ),
    ],
)
def test_passes_that_an_option_switches_off_say_so(options: CompileOptions, off: dict[str, str]) -> None:
    compiled = compiled_without_weights(FIELDS | {"num_hidden_layers": 1}, LoraShape(2, 16), options, text=True)
    shown = page_data(compiled.records, [], title="", version="", options=options)["passes"]
    assert {each["name"]: each["off"] for each in shown if "off" in each} == off
    assert [each["name"] for each in shown] == [each.name for each in PASSES], "those that were left out in their place"
    assert all(each["kernels"][0] == each["kernels"][1] and not each["changes"] for each in shown if "off" in each)
    for earlier, later in pairwise(shown):
        assert earlier["after"] == later["before"]


@pytest.mark.parametrize("off", [(), tuple(each.name for each in EXPERT_PASSES.values())], ids=["on", "off"])
def test_passes_on_experts_are_shown_for_models_with_experts(off: tuple[str, ...]) -> None:
    options = CompileOptions(disable=off)
    compiled = compile_model(sparse_model("mixtral", device="meta"), options, text=True)
    shown = page_data(compiled.records, [], title="", version="", options=options)["passes"]
    assert [each["name"] for each in shown] == [each.name for each in with_expert_passes(PASSES)]
    disabled = {each["name"]: each["off"] for each in shown if each.get("off", "").startswith("disable_passes")}
    assert disabled == {name: f"disable_passes={name}" for name in off}


def test_a_model_that_was_compiled_without_the_graphs_text_is_dumped_all_the_same(tmp_path: Path) -> None:
    model = meta_llama(layers=1)
    pages = []
    for text in (True, False):
        compiled = compile_model(model, text=text)
        assert all(bool(record.before) == text for record in compiled.records)
        pages.append((compiled.dump(tmp_path / str(text), [DECODE]) / "index.html").read_bytes())
    assert pages[0] == pages[1]


def test_a_pass_is_described_by_whole_sentences(data: dict[str, Any]) -> None:
    assert all(re.search(r"[.)]$", each["about"]) and "\n" not in each["about"] for each in data["passes"])


def test_lines_know_their_module_and_source(data: dict[str, Any]) -> None:
    (line,) = [
        line
        for line in data["lines"]
        if line[0].startswith("paged_attention =") and "sidestream.paged_attention" in line[0]
    ][:1]
    assert data["modules"][line[1]] == "model.layers.0.self_attn"
    source = data["sources"][line[2]]
    assert re.match(r"graphs/llama\.py:\d+  output = torch\.ops\.sidestream\.paged_attention\(", source), source
    assert not any(source.startswith("/") for source in data["sources"])


def test_programs_have_steps_costs_and_memory(compiled: CompiledModel, data: dict[str, Any]) -> None:
    assert [each["name"] for each in data["programs"]] == [DECODE.name, MIXED.name]
    program, shown = compiled.program(DECODE), data["programs"][0]
    assert len(shown["steps"]) == len(program.steps) and shown["arena"] == program.arena_bytes
    for step, entry in zip(program.steps, shown["steps"], strict=True):
        assert (
            entry["op"] == step.op
            and entry["lane"] == step.stream
            and tuple(entry["waits"]) == step.waits
            and entry.get("sms") == step.sm_budget
        )
        assert 0 <= entry["floor"] <= entry["alone"] and entry["start"] < entry["end"] and entry["bytes"] > 0
        assert {shown["buffers"][place][0] for place, _ in entry["writes"]} == {view.buffer for view in step.outs}
    assert {entry["layer"] for entry in shown["steps"]} == {"start", "0", "1", "end"}
    assert {entry["lane"] for entry in shown["steps"]} == {"main", "side"}
    rope = next(entry for entry in shown["steps"] if entry["op"] == "sidestream.rope_append")
    assert "hadamard=True" in rope["settings"]


def test_kernels_come_with_their_source_text(data: dict[str, Any]) -> None:
    called = {
        step["op"] for program in data["programs"] for step in program["steps"] if step["op"].startswith("sidestream.")
    }
    assert set(data["ops"]) == called
    norm = data["ops"]["sidestream.add_rms_norm_quant"]
    kernel = data["functions"][norm["kernels"][0]]
    assert (
        kernel["language"] == "Triton"
        and "def _rms_norm_kernel(" in kernel["text"]
        and kernel["file"] == "ops/elementwise/rms_norm.py"
        and kernel["line"] > 1
    )
    assert any(
        data["functions"][name]["language"] == "Gluon" for name in data["ops"]["sidestream.linear_8bit"]["kernels"]
    )
    assert "torch.Tensor" in data["functions"][norm["reference"]]["text"]


def test_steps_name_the_kernels_that_they_launch(data: dict[str, Any]) -> None:
    for program in data["programs"]:
        for step in program["steps"]:
            launched = {data["launched"][place] for place in step["kernels"]}
            assert bool(launched) == (step["op"] in data["ops"]), step["op"]
            assert not launched or launched <= set(data["ops"][step["op"]]["kernels"])


def test_every_op_reaches_a_kernel() -> None:
    own = [name for name in OPS if not name.startswith("emulated_")]  # the evaluation's have none
    sources = kernel_sources([f"sidestream.{name}" for name in own])
    assert not [name for name, op in sources.ops.items() if not op["kernels"]]
    assert kernel_sources(["aten.add.Tensor"]).ops == {}


def test_the_page_loads_nothing(page: str) -> None:
    markup = page.replace(page[page.index('id="data">') : page.index("</script>")], "")
    loads = r"""(src|href)\s*=\s*["'](?!data:)|@import|url\((?!#|data:)|https?://(?!www\.w3\.org/2000/svg)|fetch\(|XMLHttpRequest|import\("""
    assert not re.search(loads, markup)
    assert "default-src 'none'" in page and "<!--" not in page


def test_text_in_the_data_cannot_end_the_script(data: dict[str, Any]) -> None:
    made = render({**data, "title": "</title><b>", "recipes": {"x": "</script><script>alert(1)</script><!--"}})
    assert data_of(made)["recipes"]["x"].startswith("</script>") and "<title>&lt;/title&gt;" in made
    assert made.count("</script>") == 2


def test_scripts_stay_small_enough_to_read() -> None:
    assert sum(part(name).count("\n") for name in SCRIPTS) < 800
    assert all(part(name).startswith(("//", '"use strict";')) for name in SCRIPTS)


def norm_resources(steps: int) -> Resources:
    """Step 2 launches a norm kernel in two variants."""
    figures = [
        {"registers": registers, "spills": 0, "shared_bytes": shared} for registers, shared in ((40, 512), (32, 1024))
    ]
    variants = [("ops.elementwise.rms_norm._rms_norm_kernel", each) for each in figures]
    return Resources(
        "sm_90",
        variants,
        {DECODE.name: [[0, 1] if index == 2 else [] for index in range(steps)]},
        {"sidestream.hadamard": "no reason"},
    )


def test_resources_are_on_the_page_only_when_asked_for(compiled: CompiledModel, tmp_path: Path) -> None:
    timings = Timings(resources=norm_resources(len(compiled.program(DECODE).steps)))
    compiled.dump(tmp_path / "none", [DECODE])
    compiled.dump(tmp_path / "plain", [DECODE], timings=timings)
    shown = data_of(
        (compiled.dump(tmp_path / "shown", [DECODE], timings=timings, show_resources=True) / "index.html").read_text()
    )
    assert (tmp_path / "none" / "index.html").read_bytes() == (tmp_path / "plain" / "index.html").read_bytes()
    assert shown["functions"]["ops.elementwise.rms_norm._rms_norm_kernel"]["resources"] == {
        "registers": 40,
        "spills": 0,
        "shared_bytes": 1024,
    }, "the largest of both"
    assert (
        shown["programs"][0]["steps"][2]["variants"] == [0, 1]
        and shown["target"] == "sm_90"
        and "sidestream.hadamard" in shown["refused"]
    )
    assert not any("seconds" in each for each in shown["passes"])
    with pytest.raises(TimingsError, match="have 1 steps"):
        wrong = Timings(resources=Resources("sm_90", [], {DECODE.name: [[]]}))
        compiled.dump(tmp_path / "wrong", [DECODE], timings=wrong, show_resources=True)


def test_measured_times_are_on_the_page_only_when_asked_for(compiled: CompiledModel, tmp_path: Path) -> None:
    steps = compiled.program(DECODE).steps
    timings = Timings(
        steps={DECODE.name: [(1e-6 * index, 1e-6 * index + 3e-6) for index in range(len(steps))]},
        resources=norm_resources(len(steps)),
        device="cpu",
    )
    plain = data_of((compiled.dump(tmp_path / "plain", [DECODE], timings=timings) / "index.html").read_text())
    timed = data_of(
        (compiled.dump(tmp_path / "timed", [DECODE], timings=timings, show_timings=True) / "index.html").read_text()
    )
    assert not any("seconds" in each for each in plain["passes"]) and "measured" not in plain["programs"][0]
    assert all(each["seconds"] > 0 for each in timed["passes"]) and timed["programs"][0]["measured"][2] == [2.0, 5.0]
    assert timed["functions"]["ops.elementwise.rms_norm._rms_norm_kernel"]["resources"]["registers"] == 40
    assert "resources" not in plain["functions"]["ops.elementwise.rms_norm._rms_norm_kernel"]
    again = Timings.load(tmp_path / "plain" / "timings.json")
    assert again.device == "cpu" == timed["device"] and "device" not in plain
    assert [list(place) for place in again.steps[DECODE.name]] == [list(place) for place in timings.steps[DECODE.name]]
    assert again.resources.kernels == timings.resources.kernels
    with pytest.raises(TimingsError, match="have 1 steps"):
        compiled.dump(
            tmp_path / "wrong", [DECODE], timings=Timings(steps={DECODE.name: [(0.0, 1.0)]}), show_timings=True
        )


BAD_RESOURCES = [
    f'{{"resources": {text}}}'
    for text in ("[]", '{"variants": [["k", 1]]}', '{"launches": {"p": [[0]]}}', '{"launches": {"p": 3}}')
]


BAD_TIMES = [
    "[",
    "[1]",
    '{"passes": []}',
    '{"passes": {"a": "b"}}',
    '{"steps": {"p": [1.0]}}',
    '{"steps": {"p": [[1.0]]}}',
]


@pytest.mark.parametrize("text", [*BAD_TIMES, *BAD_RESOURCES])
def test_what_is_no_timings_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "timings.json").write_text(text)
    with pytest.raises(TimingsError, match=r"timings\.json"):
        Timings.load(tmp_path / "timings.json")


def test_the_error_of_a_ledger_is_shown_with_its_pass(compiled: CompiledModel, tmp_path: Path) -> None:
    shown = data_of((compiled.dump(tmp_path, [DECODE], ledger={"quantize_kv": 0.002}) / "index.html").read_text())
    assert {each["name"]: each["error"] for each in shown["passes"] if "error" in each} == {"quantize_kv": 0.002}


def test_chosen_layers_only(compiled: CompiledModel, tmp_path: Path) -> None:
    compiled.dump(tmp_path, [DECODE], layers=[1])
    assert all(
        set(graph) == {"start", "1", "end"} for graph in data_of((tmp_path / "index.html").read_text())["graphs"]
    )
    text = next(tmp_path.glob("*_lift_rms_norm.after.py")).read_text()
    assert (
        "# left out: layers 0" in text
        and "model.layers.1." in text
        and "model.layers.0." not in text
        and "p_lm_head_weight" in text
    )
    compile(text, "after.py", "exec")


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """A child, whose hashes have a seed of its own, and this one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**FIELDS, "num_hidden_layers": 2}))
    arguments = ["inspect", "dump", str(tmp_path / "model"), "--max-loras", "2", "--bucket", "4", "mixed:16", "-o"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "sidestream.tools.cli", *arguments, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert cli.main([*arguments, str(tmp_path / "b")]) == 0
    roots = (tmp_path / "a", tmp_path / "b")
    first, second = (
        {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for root in roots
    )
    assert (
        first.keys() == second.keys()
        and {"index.html", "timings.json", "decode_t4_b4_p8_lora/program.json"} <= first.keys()
    )
    assert [name for name in first if first[name] != second[name]] in ([], ["timings.json"])


def test_32_layers_of_the_8b_shape_stay_under_5_mb(tmp_path: Path) -> None:
    """By what the page of four layers is and what two of them add; each layer has the same lines but for its number."""
    few, more = (dumped_8b(tmp_path / str(layers), layers) for layers in (2, 4))
    sizes = [page.stat().st_size for page in (few, more)]
    assert sizes[0] < sizes[1] and sizes[1] + 14 * 1.1 * (sizes[1] - sizes[0]) < 5e6
    assert {str(layer) for layer in range(4)} < set(data_of(more.read_text())["graphs"][0])
