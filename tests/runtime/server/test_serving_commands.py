"""`keys curve`, `serve` and `generate --server` on a machine with a full disk, and processes that are stopped for a
while.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sidestream
from sidestream.runtime.protocol.messages import Sampling
from sidestream.tools.bench.random_model import TINY, write_model
from support.fake_runner import continuation
from support.serving import GUARD, free_port, serve_fake

CLI = [sys.executable, "-m", "sidestream.tools.cli"]
DISK = 0  # bytes that a file may have


def command(*arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=300, check=False, **options)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address, folder, the server's output) of a server with keys, under whose cache no program can be
    written.
    """
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "model", TINY, 2, 4)
    assert command("keys", "curve", str(folder / "keys"), "--client", "alice").returncode == 0
    with free_port() as port:
        yield from serving(folder, port)


def serving(folder, port):
    """See `served`."""
    arguments = [
        "serve",
        "--no-http",
        str(folder / "model"),
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--max-model-len",
        "128",
        "--seed",
        "3",
        "--bind",
        f"tcp://127.0.0.1:{port}",
        "--keys",
        str(folder / "keys" / "server"),
        "--lora-modules",
        f"one={folder}/model/adapters/random-0",
        f"two={folder}/model/adapters/random-1",
    ]
    environment = os.environ | {"SIDESTREAM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, DISK))  # noqa: E731
    process = subprocess.Popen(
        [*CLI, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=limit,
    )
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if "serving at" in line:
            break
    yield f"tcp://127.0.0.1:{port}", folder, "".join(lines)
    process.send_signal(signal.SIGTERM)
    lines += process.stderr.readlines()
    assert process.wait(GUARD) == 0, "".join(lines)


def test_who_has_keys_is_answered_and_others_are_not(served):
    address, folder, _ = served
    arguments = [
        "generate",
        "--server",
        address,
        "-p",
        "Hello",
        "-a",
        "two",
        "--max-tokens",
        "9",
        "--ignore-eos",
        "--temperature",
        "0",
        "--json",
    ]
    done = command(*arguments, "--keys", str(folder / "keys" / "client-alice"))
    assert done.returncode == 0, done.stderr
    llm = sidestream.LLM(
        str(folder / "model"),
        {"two": str(folder / "model" / "adapters" / "random-1")},
        load_format="dummy",
        device="cpu",
        precision="fp32",
        max_model_len=128,
        seed=3,
        show_progress=False,
    )
    params = sidestream.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    assert (
        json.loads(done.stdout)["text"]
        == llm.generate(["Hello"], params, adapter="two", use_tqdm=False)[0].outputs[0].text
    )
    without = command(*arguments, "--connect-timeout", "1")
    assert without.returncode != 0 and "Traceback" not in without.stderr
    assert command("keys", "curve", str(folder / "others"), "--client", "eve").returncode == 0
    (folder / "others" / "client-eve" / "server.public").write_bytes(
        (folder / "keys" / "client-alice" / "server.public").read_bytes()
    )
    stranger = command(*arguments, "--keys", str(folder / "others" / "client-eve"), "--connect-timeout", "60")
    assert stranger.returncode != 0 and "does not admit" in stranger.stderr


def test_a_full_disk_costs_the_next_start_its_time_and_nothing_else(served):
    _, folder, output = served
    kept = list((folder / "cache").rglob("*"))
    assert not [path for path in kept if path.suffix in (".json", ".tmp")], "no program, and no half of one"
    assert "is not kept for the next start" in output


@pytest.mark.parametrize("stopped", ["server.batcher", "fake_gpu"])
def test_processes_that_sleep_for_a_while_go_on(tmp_path, stopped):
    """To everybody else, and to its own timers, that is a clock that jumps ahead."""
    with serve_fake(tmp_path, step_seconds=0.002) as server, server.connect() as wire:
        wire.submit("a", Sampling(temperature=0.0, ignore_eos=True, max_tokens=300), prompt_token_ids=[1])
        wire.submit(
            "b",
            Sampling(temperature=0.0, ignore_eos=True, max_tokens=300),
            prompt_token_ids=[2],
            deadline_seconds=GUARD,
        )
        wire.until(lambda: all(wire.answers[name].num_tokens > 2 for name in "ab"))
        child = server.child(stopped)
        os.kill(child, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(child, signal.SIGCONT)
        for name, first in (("a", 1), ("b", 2)):
            assert wire.answer(name).token_ids[0] == continuation([first], -1, 300, 251)


def test_nothing_goes_by_the_clock_on_the_wall():
    """Which jumps: deadlines, heartbeats and figures use the monotonic one."""
    folder = Path(sidestream.__file__).parent / "runtime"
    users = {
        path.name
        for path in folder.rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|\bdatetime\b(?! import timedelta)", path.read_text())
        and "gateway" not in path.relative_to(folder).parts  # which tells dates to its clients and logs
    }
    allowed = {"chat_template_process.py", "engine.py", "logs.py", "receipt.py", "requests.py", "saved_adapters.py"}
    assert users == allowed | {"sequence_states.py"}, (
        "a chat template may ask for today's date, results say when their request came and started, files, logs "
        "and receipts have its times, and stamps of adapters outlive the host's start"
    )
