"""The command's surface: help that teaches, and mistakes that end in one line and exit code 2."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sidestream.runtime.processes.out_of_memory import out_of_memory
from sidestream.tools import cli
from sidestream.tools.commands import collect_env
from sidestream.tools.options.engine import writing

COMMANDS = (
    ["demo"],
    ["generate"],
    ["inspect", "dump"],
    ["inspect", "ledger"],
    ["chat"],
    ["keys", "http"],
    ["keys", "curve"],
    ["fleet", "deploy"],
    ["usage"],
    ["collect-env"],
    ["bench", "latency"],
    ["bench", "serve"],
)


def run_expecting_exit(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as leave:
        return int(leave.code or 0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_by_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_expecting_exit([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown and f"  sidestream {' '.join(command)}" in shown


def test_top_help_names_every_command_and_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_expecting_exit(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command[0] in shown for command in COMMANDS)
    assert "demo model" in shown
    assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 80, "it fits one screen"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["dump", "-o", "x"], ["inspect", "dump", "-o", "x"]),
        (["keygen", "x"], ["keys", "curve", "x"]),
        (["keys", "list", "x"], ["keys", "http", "list", "x"]),
        (["deploy", "--check"], ["fleet", "deploy", "--check"]),
        (["complete", "-p", "x", "--address=y"], ["generate", "--server", "-p", "x", "--server=y"]),
    ],
)
def test_an_old_name_works_and_names_the_new_one(
    old: list[str], new: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = cli.build_parser().parse_args(cli.with_new_name(old))
    (hint,) = capsys.readouterr().err.splitlines()
    assert parsed == cli.build_parser().parse_args(new) and f"now `{' '.join(new[:2])}" in hint
    assert cli.with_new_name(new) == new and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [(["serve", "--max-model", "100"], "--max-model-len"), (["generate", "-p", "hi", "--n", "0"], None)],
)
def test_a_flag_is_not_taken_for_a_longer_one(
    arguments: list[str], suggested: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--n 0` was read as --no-hadamard with the model 0."""
    assert run_expecting_exit(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"unrecognized arguments: {arguments[-2]}" in line and (suggested is None or f"mean {suggested}?" in line)


def test_help_is_quick_because_torch_is_not_imported() -> None:
    code = (
        "import sys; from sidestream.tools import cli; cli.build_parser(); print('torch' in sys.modules, "
        "'tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


def test_the_process_that_watches_a_servers_others_needs_no_torch() -> None:
    code = (
        "import sys; from sidestream.tools import cli; from sidestream.tools.commands import serve; "
        "from sidestream.runtime.server import supervisor; "
        "serve.settings_of(cli.build_parser().parse_args(['serve', '--no-http'])); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["no-such-command"], "no-such-command"),
        (["generate", "no/such/model", "-p", "hi"], "config.json"),
        (["generate", "-p", "hi", "-a", "unknown"], "--lora-modules unknown="),
        (["generate", "-p", "hi", "-p", "ho", "-p", "hu", "-a", "shout", "-a", "none"], "2 adapters for 3 prompts"),
        (["generate", "-p", "hi", "--lora-modules", "nameless"], "NAME=DIRECTORY"),
        (["generate", "-p", "hi", "--lora-modules", "bad/name=x"], "NAME=DIRECTORY"),
        (["generate", "-p", "hi", "--lora-modules", "mine=no/such/adapter"], "adapter_config.json"),
        (["generate", "-p", "hi", "--lora-modules", "one=a", "twin=a", "twin=b"], "adapter 'twin' twice"),
        (["generate", "-p", "hi", "--max-tokens", "0"], "at least 1"),
        (["generate", "-p", "hi", "--gpu-memory-utilization", "1.5"], "at most 1"),
        (["generate", "--prompt-ids", "1,two"], "token ids"),
        (["generate", "-p", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "-p", "hi", "--precision", "fp4"], "fp4"),
        (["inspect", "dump", "no/such/model"], "config.json"),
        (["inspect", "dump", "--bucket", "decode"], "decode:8"),
        (["inspect", "dump", "--disable-pass", "no_such_pass"], "no_such_pass"),
        (["inspect", "dump", "--precision", "bf16", "--kv-cache-dtype", "int8"], "int8"),
        (["inspect", "dump", "--max-lora-rank", "8"], "--max-lora-rank"),
        (["inspect", "dump", "-o", str(Path(__file__))], "is a file"),
        (["inspect", "ledger", "no/such/model"], "config.json"),
        (["inspect", "ledger", "--disable-pass", "no_such_pass"], "no_such_pass"),
        (["inspect", "ledger", "--json", "no/such/folder/out.json"], "existing directory"),
        (["inspect", "ledger", "--max-loras", "1"], "--max-loras"),
        (["gateway", "--resolve-adapters"], "add --adapter-root DIR"),
        (["bench"], "BENCH"),
        (["bench", "latency", "--output-len", "32"], "above 32"),
        (["bench", "latency", "--model", "no/such/model"], "config.json"),
        (["bench", "latency", "--output-json", "no/such/folder/out.json"], "existing directory"),
        (["bench", "latency", "--lora", "all"], "all"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_expecting_exit(arguments) == 2
    shown = capsys.readouterr().err.strip()
    assert len(shown.splitlines()) == 1, shown
    assert "error: " in shown and said in shown


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(collect_env, "collect", broken)
    with pytest.raises(KeyError):
        cli.main(["collect-env"])


def test_no_prompt_says_how_to_give_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    assert cli.main(["generate"]) == 2
    assert "-p" in capsys.readouterr().err


def test_collect_env_says_versions_and_nothing_private(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    release, _, _ = torch.__version__.partition("+")  # a package's metadata may leave out for which CUDA it was built
    assert found["packages"]["torch"].partition("+")[0] == release
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert str(Path.home()) not in text and str(Path.cwd()) not in text

    assert cli.main(["collect-env"]) == 0
    lines = capsys.readouterr().out
    assert re.search(rf"^torch +{re.escape(release)}", lines, re.MULTILINE) and "gpu" in lines


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = f"{sys.executable} -m sidestream.tools.cli collect-env | head -n 0"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {code}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some, or write to another"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x.jsonl"),
            "x.jsonl: No such .*; name an",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied; check its permissions"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
def test_faults_of_files_are_one_line_with_a_remedy(problem: Exception, line: str) -> None:
    assert re.match(line, cli.one_line(problem)) and "\n" not in cli.one_line(problem)


def test_a_full_disk_names_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(OSError) as full, writing(tmp_path / "out"), Path("/dev/full").open("w") as file:
        file.write("x")
        file.flush()
    assert cli.one_line(full.value).startswith(f"{tmp_path}/out: No space left on device; free some")


@pytest.mark.parametrize("megabytes", [250, 700])
def test_too_little_address_space_is_one_line(megabytes: int) -> None:
    """Before torch is loaded, and while it is."""
    command = [sys.executable, "-m", "sidestream.tools.cli", "generate", "-p", "x", "--max-tokens", "1"]
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -v {megabytes << 10}; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and f"limited to {megabytes} MiB" in line and "ulimit -v unlimited" in line


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        RuntimeError("can't start new thread"),
    ],
)
def test_whatever_says_that_memory_ran_out_is_told_as_that(problem: Exception) -> None:
    wrapped = ValueError("tensor 'x' cannot be read")
    wrapped.__cause__ = problem
    assert "memory ran out" in (out_of_memory(problem) or "") and out_of_memory(wrapped) == out_of_memory(problem)
    assert out_of_memory(ValueError("no such thing")) is None
