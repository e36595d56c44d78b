"""The commands on the demo model: what a user sees."""

import json
from functools import partial
from pathlib import Path

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.engine.engine import Engine
from sidestream.tools import cli
from sidestream.tools.bench import latency as bench_latency
from sidestream.tools.options.engine import demo_prompts

PROMPTS = demo_prompts()


def run(*arguments: str) -> None:
    assert cli.main(list(arguments)) == 0


def test_demo_gives_every_answer_and_writes_the_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("demo", "-o", str(tmp_path / "dump"))
    shown = capsys.readouterr().out
    for entry in PROMPTS:
        assert any(
            str(entry["prompt"]) in line and line.endswith(str(entry["answer"])) for line in shown.splitlines()
        ), entry
    assert "pack_projections" in shown and "->" in shown
    assert str(tmp_path / "dump") in shown
    assert list((tmp_path / "dump").glob("*_lift_lora.after.py"))
    assert list((tmp_path / "dump").rglob("program.json"))


def test_demo_with_a_pass_left_out_gives_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("demo", "-o", str(tmp_path), "--precision", "fp32", "--disable-pass", "pack_projections")
    shown = capsys.readouterr().out
    assert all(str(entry["answer"]) in shown for entry in PROMPTS)
    assert not [line for line in shown.splitlines() if line.startswith("pack_projections")]


def test_generate_answers_each_prompt_with_its_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        argument for entry in PROMPTS for argument in ("-p", str(entry["prompt"]), "-a", entry["adapter"] or "none")
    ]
    run("generate", "--json", "--max-model-len", "256", *given)
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [output["text"].strip() for output in outputs] == [entry["answer"] for entry in PROMPTS]
    assert [output["adapter"] for output in outputs] == [entry["adapter"] for entry in PROMPTS]
    assert {output["finish_reason"] for output in outputs} == {"stop"}


def test_generate_shows_one_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run("generate", str(DEMO_MODEL), "-p", str(PROMPTS[0]["prompt"]), "--max-model-len", "256")
    assert capsys.readouterr().out.strip() == PROMPTS[0]["answer"]


def test_generate_takes_adapters_by_path_and_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    path = DEMO_MODEL / "adapters" / "json"
    run(
        "generate",
        str(DEMO_MODEL),
        "--lora-modules",
        f"mine={path}",
        "-a",
        "mine",
        "--prompt-ids",
        "0,40,50",
        "--max-tokens",
        "3",
        "--ignore-eos",
        "--max-model-len",
        "256",
    )
    shown = capsys.readouterr().out
    assert "[mine] 0,40,50" in shown


def test_dump_writes_every_pass_and_the_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", "dump", "-o", str(tmp_path / "dump"), "--bucket", "decode:4", "mixed:64")
    shown = capsys.readouterr().out
    assert "lift_rms_norm" in shown and str(tmp_path / "dump") in shown
    programs = [json.loads(path.read_text()) for path in (tmp_path / "dump").rglob("program.json")]
    assert sorted((program["bucket"]["tokens"], program["bucket"]["decode"]) for program in programs) == [
        (4, True),
        (64, False),
    ]
    assert any(
        "lora" in line for path in (tmp_path / "dump").rglob("program.txt") for line in path.read_text().splitlines()
    )


def test_dump_reads_no_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    run(
        "dump",
        str(model),
        "-o",
        str(tmp_path / "dump"),
        "--max-loras",
        "2",
        "--max-lora-rank",
        "12",
        "--lora-target-modules",
        "o_proj",
        "down_proj",
        "--bucket",
        "decode:2",
    )
    text = next((tmp_path / "dump").rglob("program.txt")).read_text()
    assert "o_proj.lora" in text and "down_proj.lora" in text and "q_proj.lora" not in text


def test_dump_measures_each_step_where_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", "dump", "-o", str(tmp_path / "here"), "--bucket", "2", "--measure")
    timings = json.loads((tmp_path / "here" / "timings.json").read_text())
    (program,) = [json.loads(path.read_text()) for path in (tmp_path / "here").rglob("program.json")]
    (places,) = timings["steps"].values()
    assert len(places) == len(program["steps"])
    assert all(0 <= start < end for start, end in places) and places == sorted(places)
    timings["device"] = "NVIDIA H100 80GB HBM3"
    (tmp_path / "here" / "timings.json").write_text(json.dumps(timings))
    run(
        "dump",
        "-o",
        str(tmp_path / "there"),
        "--bucket",
        "2",
        "--timings",
        "--measured",
        str(tmp_path / "here" / "timings.json"),
    )
    pages = [(tmp_path / name / "index.html").read_text() for name in ("here", "there")]
    assert all('"measured":[[0' in page for page in pages)
    assert '"gpu":"H200"' in pages[0] and '"gpu":"H100"' in pages[1], (
        "times are estimated for the GPU that was measured"
    )
    capsys.readouterr()
    assert cli.main(["inspect", "dump", "--measure", "--measured", "timings.json"]) == 2
    assert "contradict" in capsys.readouterr().err


def test_bench_latency_measures_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock counts the engine's steps: what else this machine does is no part of one, and each takes a second."""
    steps, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(self) or step(self))
    monkeypatch.setattr(bench_latency, "measure", partial(bench_latency.measure, clock=lambda: float(len(steps))))
    target = tmp_path / "latency.json"
    run(
        *[
            "bench",
            "latency",
            "--model",
            "demo",
            "--concurrency",
            "1",
            "2",
            "--lora",
            "none",
            "four",
            "--input-len",
            "8",
            "--output-len",
            "40",
        ],
        *("--num-iters", "1", "--num-adapters", "2", "--lora-rank", "4", "--output-json", str(target)),
    )
    found = json.loads(target.read_text())
    assert [(row["lora"], row["concurrency"], row["active_adapters"]) for row in found["rows"]] == [
        ("none", 1, 0),
        ("none", 2, 0),
        ("four", 1, 1),
        ("four", 2, 2),
    ]
    for row in found["rows"]:
        assert row["ms_per_step"] == pytest.approx(1000.0) and row["floor_ms"] > 0
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
    assert found["options"]["output_len"] == 40 and found["environment"]["packages"]["torch"]
    shown = capsys.readouterr().out
    assert "ms/step" in shown and str(target) in shown
    lines = [line for line in shown.splitlines() if line.startswith(("none ", "four "))]
    assert len(lines) == 4 and all(line.endswith(" -") for line in lines), "a CPU has no share of a GPU's floor"
    assert "floor: none on a CPU" in shown and "read once" not in shown


def test_a_step_is_the_difference_of_two_runs() -> None:
    clock = [0.0]

    def generate(length: int) -> None:
        clock[0] += 0.5 + 0.002 * length

    step, spread, whole = bench_latency.measure(generate, 256, 3, clock=lambda: clock[0])
    assert step == pytest.approx(2.0) and spread == pytest.approx(0.0, abs=1e-6) and whole == pytest.approx(0.5 + 0.512)


def test_a_run_that_shows_no_step_time_is_refused() -> None:
    with pytest.raises(ValueError, match="--output-len"):
        bench_latency.measure(lambda length: None, 256, 1, clock=lambda: 0.0)
