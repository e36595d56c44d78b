"""The comparison with vLLM: the driving code runs on the demo model, with a stand-in for vLLM that takes only what vLLM
takes.
"""

import json
import os
from pathlib import Path

import pytest
from sidestream.tools.bench.random_model import LLAMA_8B
from sidestream.tools.dev.bench import versus_vllm
from sidestream.tools.options.models import shape_fields

SUPPORT = Path(__file__).parents[3] / "support"
SMALL = [
    "demo",
    "--concurrency",
    "2",
    "--input-len",
    "4",
    "--output-len",
    "128",
    "--prefill-len",
    "16",
    "--num-iters",
    "1",
]
TRIES = 5
LIKE_VLLM = ["--num-adapters", "2", "--lora-rank", "4"]


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find a module `vllm`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT / "fake_vllm"), str(SUPPORT.parent)]))


def test_both_engines_run_every_load_in_processes_of_their_own(
    with_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "found.json"
    small = [*SMALL, *LIKE_VLLM, "--lora", "zipf", "--sidestream-args", '{"device": "cpu"}']
    for _ in range(TRIES):
        code, shown = versus_vllm.main([*small, "--output-json", str(target)]), capsys.readouterr()
        if "took no longer than" not in shown.err:  # a busy machine may stand still while it makes the shorter answers
            break
    assert code == 0, shown.err
    found = json.loads(target.read_text())
    assert [(row["workload"], row["concurrency"], row["lora"]) for row in found["rows"]] == [
        ("A", 2, "zipf"),
        ("P", 16, "zipf"),
    ]
    first, second = found["rows"]
    for engine in versus_vllm.ENGINES:
        assert first[engine]["ms_per_step"] > 0 and first[engine]["tokens_per_second"] > 0
        assert second[engine]["ms_per_step"] is None and second[engine]["tokens_per_second"] > 0
    assert found["engines"][0]["engine"] == "vllm" and found["engines"][0]["version"] == "0.0.fake"
    assert found["engines"][0]["arguments"]["quantization"] == "fp8"
    assert all(len(line) <= 100 for line in shown.out.splitlines() if str(tmp_path) not in line)
    assert len([line for line in shown.out.splitlines() if line.startswith(("A ", "P "))]) == 2


def test_the_table_shows_both_engines_and_how_many_times_as_fast() -> None:
    rows = [
        {
            "workload": "A",
            "concurrency": 64,
            "lora": "zipf",
            "vllm": {"ms_per_step": 9.56, "spread_percent": 1.0, "tokens_per_second": 6203.0},
            "sidestream": {"ms_per_step": 3.412, "spread_percent": 1.0, "tokens_per_second": 16688.0},
        },
        {
            "workload": "P",
            "concurrency": 16,
            "lora": "none",
            "vllm": {"ms_per_step": None, "spread_percent": 1.0, "tokens_per_second": 68541.0},
        },
    ]
    head, _, first, second = versus_vllm.table(rows).splitlines()
    assert head.split("  ")[0] == "load" and head.endswith("times as fast")
    assert first.split() == ["A", "64", "zipf", "9.560", "3.412", "6,203", "16,688", "2.69"]
    assert second.split() == ["P", "16", "none", "-", "-", "68,541", "-", "-"]


def test_each_engine_gets_its_own_spelling() -> None:
    options = versus_vllm.build_parser().parse_args(["--vllm-args", '{"specialize_active_lora": true}'])
    jobs = {
        engine: versus_vllm.job(options, engine, "zipf", Path("/m"), True, ["/a", "/b"], LLAMA_8B)
        for engine in versus_vllm.ENGINES
    }
    assert jobs["vllm"]["loads"] == jobs["sidestream"]["loads"]
    assert [load["concurrency"] for load in jobs["vllm"]["loads"]] == [1, 8, 64, 16]
    peer, ours = jobs["vllm"]["arguments"], jobs["sidestream"]["arguments"]
    assert peer["specialize_active_lora"] and peer["quantization"] == "fp8" and "precision" not in peer
    assert ours["precision"] == "int8" and "quantization" not in ours
    assert peer["max_model_len"] == ours["max_model_len"] == 2049 and peer["load_format"] == "dummy"
    alone = versus_vllm.job(options, "vllm", "none", Path("/m"), False, ["/a"], LLAMA_8B)
    assert "enable_lora" not in alone["arguments"] and "load_format" not in alone["arguments"]
    assert jobs["vllm"]["request"] == {} and "enable_mixed_moe_lora_format" not in peer
    experts = {
        engine: versus_vllm.job(options, engine, "zipf", Path("/m"), True, ["/a"], shape_fields("qwen3-30b-a3b"))
        for engine in versus_vllm.ENGINES
    }
    assert experts["vllm"]["request"] == {"is_3d_lora_weight": True} and experts["sidestream"]["request"] == {}
    assert experts["vllm"]["arguments"]["enable_mixed_moe_lora_format"]
    assert alone["adapters"] == [] and set(alone["loads"][0]["chosen"]) == {None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--engines", "sidestream", "--output-len", "32"], "above 32"),
        (["demo", "--vllm-python", "/no/such/python"], "/no/such/python"),
        (["demo", "--engines", "sidestream", "--output-json", "/no/such/folder/x"], "existing directory"),
        (["/no/such/model", "--engines", "sidestream"], "give a directory"),
        (["demo"], "--vllm-python"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert versus_vllm.main(arguments) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and said in error and "error: " in error


def test_an_engine_that_refuses_its_arguments_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "vllm.py"
    broken.write_text("def LLM(**arguments): raise ValueError(f'no quantization called {arguments[\"quantization\"]}')")
    (tmp_path / "vllm.lora.request.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken.write_text(
        "import sys, types\nsys.modules['vllm.lora.request'] = types.ModuleType('r')\n" + broken.read_text()
    )
    monkeypatch.chdir(tmp_path)
    assert versus_vllm.main([*SMALL, "--lora", "none", "--quantization", "fp3"]) == 2
    error = capsys.readouterr().err
    assert "vllm ended early: ValueError: no quantization called fp3" in error and "Traceback" not in error
