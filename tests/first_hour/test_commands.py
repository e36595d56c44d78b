"""What a newcomer sees of the commands: where MODEL goes, what the help ends with, progress, and what to try next."""

import json
import re
import shlex
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import sidestream
import torch
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.worker.progress import progress, stage
from sidestream.tools import cli
from sidestream.tools.bench.latency import Row, line
from sidestream.tools.commands.demo import next_steps
from sidestream.tools.options import environment

QUICK = ["--max-model-len", "128", "--max-tokens", "4", "--device", "cpu"]
BENCHES = ("latency", "throughput", "startup")


@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench_takes_its_model_by_position_and_by_its_former_flag(bench: str) -> None:
    parser = cli.build_parser()
    assert parser.parse_args(["bench", bench, "demo"]).model == "demo"
    assert parser.parse_args(["bench", bench, "--model", "demo"]).model == "demo"
    assert parser.parse_args(["bench", bench]).model is None


@pytest.mark.parametrize(
    "command", [["generate"], ["serve"], ["inspect", "dump"], ["inspect", "ledger"], ["demo"], ["bench", "latency"]]
)
def test_what_few_need_stands_last(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    shown = capsys.readouterr().out
    groups = re.findall(r"^([a-z]+):$", shown, re.MULTILINE)
    assert groups[-2:] == ["advanced", "examples"]
    rare = shown[shown.index("\nadvanced:\n") :]
    for flag in (
        "--hadamard",
        "--center-keys",
        "--balance-keys",
        "--rotate-values",
        "--kv-cache-dtype",
        "--lora-dtype",
    ):
        assert f"\n  {flag}" in rare
    assert "\n  --disable-pass" in rare and "\n  --precision" not in rare


def test_the_versions_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert left.value.code == 0 and first.split(" (commit ")[0] == f"sidestream {sidestream.__version__}"
    release, _, _ = torch.__version__.partition("+")  # a package's metadata may leave out for which CUDA it was built
    assert f"torch {release}" in second and ", triton " in second


def test_the_commit_is_known_of_a_checkout_and_of_an_install_from_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    noted: dict[str, object] = {"url": "https://example.org", "vcs_info": {"vcs": "git", "commit_id": "0123456789" * 4}}
    installed = types.SimpleNamespace(read_text=lambda _: json.dumps(noted), version="1")
    monkeypatch.setattr(environment.metadata, "distribution", lambda _: installed)
    assert environment.commit() == "012345678901" and "(commit 012345678901)" in environment.version_text()
    noted.clear()
    assert environment.commit() is None and "commit" not in environment.version_text()
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert environment.commit() == git("rev-parse", "HEAD")[:12]
    (tmp_path / "file").write_text("2")
    assert environment.commit() == git("rev-parse", "HEAD")[:12] + "+"


def test_a_config_is_enough_for_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "alone.json"
    shutil.copy(DEMO_MODEL / "config.json", alone)
    assert cli.main(["inspect", "dump", "--shape", str(alone), "--layers", "0", "-o", str(tmp_path / "dump")]) == 0
    assert (tmp_path / "dump" / "index.html").is_file()
    capsys.readouterr()
    assert cli.main(["inspect", "dump", "--shape", "llama-3.1-8", "-o", str(tmp_path / "dump")]) == 2
    assert "did you mean llama-3.1-8b?" in capsys.readouterr().err
    assert cli.main(["inspect", "dump", str(DEMO_MODEL), "--shape", str(alone)]) == 2
    assert "name two models" in capsys.readouterr().err


def test_a_cpu_is_not_measured_against_a_gpu_s_floor() -> None:
    row = Row(1, "none", 0, 12.0, 1.0, 83.0, 0.001, 0.0001)
    assert "%" in line(row, on_gpu=True).replace("1.0%", "") and "%" not in line(row, on_gpu=False).replace("1.0%", "")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    place = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(DEMO_MODEL, place, ignore=shutil.ignore_patterns("adapters", "chat_template.jinja"))
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return place


def test_a_model_with_a_chat_template_says_how_to_use_it(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(chatty), "-p", "hi", *QUICK]) == 0
    hint, precision = capsys.readouterr().err.splitlines()
    assert "generate --chat" in hint and "sidestream chat" in hint
    assert cli.main(["generate", "-p", "hi", *QUICK]) == 0
    assert capsys.readouterr().err.splitlines() == [precision] and precision.startswith("sidestream: precision bf16, ")


def test_generate_puts_prompts_into_the_template(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(chatty), "--chat", "-p", "hi", *QUICK]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("[base] hi\n") and len(shown.err.splitlines()) == 1
    assert cli.main(["generate", str(chatty), "--chat", "-p", "hi", "-p", "ho", "--json", *QUICK]) == 0
    answers = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["<user>hi", "<user>ho"]


def test_a_model_without_a_template_has_no_chat(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chatty / "tokenizer_config.json").unlink()
    assert cli.main(["generate", str(chatty), "--chat", "-p", "hi", *QUICK]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "chat template" in error


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress([1, 2], "loading weights", "tensor", show=True)) == [1, 2]
    assert list(progress(iter([1]), "reading adapters", "adapter", show=True, total=1)) == [1]
    assert list(progress([], "reading adapters", "adapter", show=True)) == []
    assert list(progress([1], "loading weights", "tensor", show=False)) == [1]
    with stage("compiling the model", show=True):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "sidestream: loading weights (2 tensors)",
        "sidestream: reading adapters (1 adapter)",
        "sidestream: compiling the model",
    ]


def test_progress_is_a_bar_with_the_program_s_name_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress([1, 2], "loading weights", "tensor", show=True)) == [1, 2]
    with stage("compiling the model", show=True):
        pass
    shown = capsys.readouterr().err
    assert "sidestream: loading weights:   0%" in shown and "sidestream: compiling the model" in shown


def test_the_demo_ends_with_where_the_command_is_and_three_things_to_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = tmp_path / ".venv" / "bin" / "sidestream"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(command), "demo"])
    monkeypatch.setenv("PATH", str(tmp_path))
    said = next_steps("dump").strip().splitlines()
    assert said[0].startswith("The command is .venv/bin/sidestream.") and "dump/index.html" in said[0]
    calls = [each.strip().removeprefix(".venv/bin/sidestream ") for each in said if each.startswith("    .venv/bin/")]
    assert [shlex.split(call)[0] for call in calls] == ["generate", "serve", "chat", "inspect"]
    for call in calls:
        cli.build_parser().parse_args(shlex.split(call))
    assert len([each for each in said if each.endswith(":") and each.startswith("  ")]) == 3


def test_the_pass_table_of_a_dump_fits_a_hundred_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "dump", "--layers", "0", "-o", str(tmp_path / "dump")]) == 0
    table, _, _ = capsys.readouterr().out.partition("compiled in")
    assert max(map(len, table.splitlines())) <= 100
    assert "+9 sidestream.rms_norm" in table
