"""`sidestream serve --tensor-parallel-size 2`: what becomes of it when a rank is killed or stopped under load."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from sidestream.runtime.protocol.messages import Sampling
from support.live_server import Served, serving
from support.serving import GREEDY, Wire

pytestmark = pytest.mark.first
GUARD = 300.0
"""Seconds after which a test gives up; nothing is measured against them."""
LONG = Sampling(temperature=0.0, ignore_eos=True, max_tokens=2000)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--tensor-parallel-size", "2", "--max-model-len", "2048") as served:
        yield served


def children_of(parent: int, module: str) -> list[int]:
    """The process ids of the children of `parent` that run a module."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(its_parent) == parent and module in command and state != "Z":
                found.append(int(entry.name))
    return found


def ranks_of(supervisor: int) -> tuple[int, int]:
    """The process ids of rank 0, which is the GPU process, and of rank 1."""
    (gpu,) = children_of(supervisor, "server.gpu_process")
    (peer,) = children_of(gpu, "tensor_parallel.rank_process")
    return gpu, peer


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


FAULTS: dict[str, tuple[list[tuple[int, signal.Signals]], str]] = {
    "rank 1 is killed": ([(1, signal.SIGKILL)], "rank 1 of 2 died (signal 9, SIGKILL)"),
    "rank 1 is stopped": ([(1, signal.SIGSTOP)], "rank 1 of 2 is stopped by a signal (SIGSTOP)"),
    "rank 0 is killed": ([(0, signal.SIGKILL)], "the GPU process died (signal 9, SIGKILL)"),
    "rank 0 is stopped": ([(0, signal.SIGSTOP)], "the GPU process is stopped by a signal (SIGSTOP)"),
    "rank 1 is stopped, and rank 0 killed": (
        [(1, signal.SIGSTOP), (0, signal.SIGKILL)],
        "the GPU process died (signal 9, SIGKILL)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_end_the_group_comes_back_and_clients_live_on(server: Served, fault: str) -> None:
    signals, message = FAULTS[fault]
    context = zmq.Context()
    wire = Wire(server.address, context).hello(GUARD)
    try:
        wire.submit("before", GREEDY, prompt_token_ids=PROMPT)
        expected = wire.answer("before", GUARD).token_ids
        former, so_far = ranks_of(server.process.pid), len(server.log)
        for name in ("a", "b", "c"):
            wire.submit(name, LONG, prompt_token_ids=PROMPT)
        wire.until(lambda: wire.answers["a"].num_tokens > 2, GUARD)
        for rank, number in signals:
            os.kill(former[rank], number)
        for name in ("a", "b", "c"):
            error = wire.answer(name, GUARD).error
            assert error is not None and error.code == "engine_dead" and error.retry_after is not None
        wait_until(lambda: message in server.log[so_far:], f"the log does not contain {message!r}")
        wait_until(lambda: all(map(is_gone, former)), "a rank of the former group is left")
        wire.welcome = None
        wire.others.clear()
        wire.hello(GUARD).submit("after", GREEDY, prompt_token_ids=PROMPT)
        assert wire.answer("after", GUARD).token_ids == expected
        assert not set(ranks_of(server.process.pid)) & set(former)
    finally:
        wire.socket.close(0)
        context.destroy(linger=0)


def test_nothing_stays_behind(server: Served) -> None:
    """Of the groups before, and of a server that is stopped."""
    present = ranks_of(server.process.pid)
    server.process.terminate()
    assert server.process.wait(GUARD) == 0
    wait_until(lambda: all(map(is_gone, present)), "a rank is left")
    others = ("usage.db", "torchinductor_")  # torch makes a folder of its own where a graph was captured
    left = {path.name for path in server.directory.iterdir() if not path.name.startswith(others)}
    assert left == {"log", "e.sock.lock"}


def test_several_engines_of_several_ranks_behind_one_address() -> None:
    with serving("--data-parallel-size", "2", "--tensor-parallel-size", "2") as served:
        wait_until(lambda: served.log.count("serving at") == 2, "an engine does not serve")
        engines = children_of(served.process.pid, "replica_process")
        assert len(engines) == 2
        ranks = [ranks_of(engine) for engine in engines]
        assert all(map(all, ranks)) and len({process for pair in ranks for process in pair}) == 4
        with urllib.request.urlopen(f"{served.url}/v1/models", timeout=GUARD) as listed:
            name = json.loads(listed.read())["data"][0]["id"]
        body = {"model": name, "prompt": "2+3=", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = []
        for _ in range(4):
            request = urllib.request.Request(
                f"{served.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=GUARD) as answer:
                answers.append(json.loads(answer.read())["choices"][0]["text"])
        assert answers[0] and len(set(answers)) == 1
    wait_until(lambda: all(is_gone(process) for pair in ranks for process in pair), "a rank is left")
