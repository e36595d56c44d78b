"""Which processes and steps count as stopped, hung or late; a server kills such a process and continues."""

import os
import signal
import subprocess
import sys
from time import sleep
from typing import Any

import pytest
from sidestream.runtime.processes.channel import Channel
from sidestream.runtime.processes.watchdog import (
    CPU_STEP_SECONDS,
    GPU_STEP_SECONDS,
    POLL_SECONDS,
    STEP_FACTOR,
    STOPPED_POLL_SECONDS,
    STOPPED_SECONDS,
    AwakeClock,
    StepWatchdog,
    StoppedProcesses,
    is_stopped,
)
from sidestream.runtime.protocol.messages import Abort, Sampling
from sidestream.runtime.server import gpu_process
from support.fake_runner import continuation
from support.serving import Wire, serve_fake

LONG = Sampling(temperature=0.0, ignore_eos=True, max_tokens=400)
TWO = Sampling(n=2, temperature=1.0, seed=5, ignore_eos=True, max_tokens=400)
SHORT = Sampling(temperature=0.0, ignore_eos=True, max_tokens=6)
GUARD = 120.0
"""Seconds after which a test gives up; nothing is measured against them."""


class Time:
    """A simulated clock, updated as by a loop."""

    def __init__(self, timeout: float | None = None, device: str = "cuda:0", longest: float = 0.0) -> None:
        self.now = 1000.0
        self.clock = AwakeClock(lambda: self.now)
        self.watch = StepWatchdog(self.clock, timeout, device, longest)

    def pass_by(self, seconds: float) -> None:
        """The process is awake for so long."""
        for _ in range(round(seconds / POLL_SECONDS)):
            self.now += POLL_SECONDS
            self.clock.update()

    def pause(self, seconds: float) -> None:
        """The process is stopped for so long."""
        self.now += seconds
        self.clock.update()


def test_a_step_is_late_and_then_overdue():
    time = Time(timeout=40.0)
    time.pass_by(100)
    time.watch.step_submitted(7)
    time.pass_by(10)
    assert not time.watch.late
    time.pass_by(1)
    assert time.watch.late and time.watch.overdue is None
    time.pass_by(29)
    assert time.watch.overdue is None
    time.pass_by(1)
    assert time.watch.overdue == 7
    time.watch.step_returned()
    assert not time.watch.late and time.watch.overdue is None


def test_a_step_in_line_begins_when_the_one_before_it_has_returned():
    time = Time(timeout=40.0)
    time.watch.step_submitted(7)
    time.watch.step_submitted(8)
    time.pass_by(39)
    time.watch.step_returned()
    time.pass_by(40)
    assert time.watch.overdue is None
    time.pass_by(1)
    assert time.watch.overdue == 8


@pytest.mark.parametrize(("device", "floor"), [("cpu", CPU_STEP_SECONDS), ("cuda:0", GPU_STEP_SECONDS)])
def test_a_step_may_take_what_others_took(device, floor):
    time = Time(device=device)
    assert time.watch.limit == floor
    time.watch.step_submitted(0)
    time.pass_by(floor / 2)
    time.watch.step_returned()
    assert time.watch.limit == STEP_FACTOR * floor / 2


def test_a_slow_step_raises_no_bound_that_the_cost_model_gives():
    time = Time(longest=20.0)
    for step in range(3):
        time.watch.step_submitted(step)
        time.pass_by(199)
        assert time.watch.late and time.watch.overdue is None
        time.watch.step_returned()
    time.watch.step_submitted(3)
    time.pass_by(201)
    assert time.watch.overdue == 3
    assert Time(longest=0.01).watch.limit == GPU_STEP_SECONDS


def test_zero_waits_for_ever():
    time = Time(timeout=0.0)
    time.watch.step_submitted(0)
    time.pass_by(10_000)
    assert time.watch.overdue is None and not time.watch.late


def test_a_pause_is_no_waiting():
    time = Time(timeout=40.0)
    time.watch.step_submitted(0)
    time.pause(86_400)
    assert time.watch.overdue is None and not time.watch.late


def test_a_stopped_process_differs_from_one_that_computes_or_sleeps():
    for work in ("while True: pass", "import time; time.sleep(1000)"):
        with subprocess.Popen([sys.executable, "-c", work]) as process:
            assert not is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert is_stopped(process.pid)
            os.kill(process.pid, signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            assert not is_stopped(process.pid)
            process.kill()
            process.wait()
            assert not is_stopped(process.pid), "it is gone"


def test_a_process_that_stays_stopped_is_named_and_one_that_goes_on_is_not():
    now, stopped = [50.0], {7, 8}
    watch = StoppedProcesses(lambda: now[0], stopped.__contains__)
    looks = round(STOPPED_SECONDS / STOPPED_POLL_SECONDS)

    def look(seconds: float = STOPPED_POLL_SECONDS) -> list[int]:
        now[0] += seconds
        return watch.find([7, 8, 9])

    assert not any(look() for _ in range(looks - 2))
    stopped.discard(8)
    assert not look(86_400), "a pause of everything counts as two looks at most"
    assert [look() for _ in range(3)][-1] == [7]
    stopped.add(8)
    assert not any(8 in look() for _ in range(looks)), "the count starts again"
    assert [look() for _ in range(3)][-1] == [7, 8]


def test_heartbeats_never_block():
    mine, theirs = Channel.pair()
    other = Channel(theirs)
    for _ in range(10_000):  # more than the socket holds
        mine.send_heartbeat()
    received = other.receive()
    assert 0 < len(received) < 10_000 and all(message == {"event": "beat"} for message in received)
    mine.send({"event": "after"})
    assert other.receive() == [{"event": "after"}], "no beat was sent in part"
    other.close()
    mine.send_heartbeat()


def assert_works(wire: Wire) -> None:
    wire.submit("works", SHORT, prompt_token_ids=[7, 8])
    assert wire.answer("works", GUARD).token_ids[0] == continuation([7, 8], -1, 6, 251)


def again(wire: Wire) -> Wire:
    """Greet the restarted engine."""
    wire.welcome = None
    wire.others.clear()
    return wire.hello(GUARD)


def test_a_stopped_gpu_process_is_reported_killed_and_replaced(tmp_path):
    with serve_fake(tmp_path, silence_seconds=10.0) as server, server.connect() as wire:
        with server.held(beyond=20):
            wire.submit("a", LONG, prompt_token_ids=[1])
            wire.until(lambda: wire.answers["a"].num_tokens > 2)
            os.kill(server.child("fake_gpu"), signal.SIGSTOP)
        wire.until(lambda: server.health().status == "stalled", GUARD)
        error = wire.answer("a", GUARD).error
        assert error.code == "engine_dead" and error.retry_after > 0
        assert_works(again(wire))
        assert server.health().status == "ok"
        assert "the GPU process sent no heartbeat for 10 s" in server.log.read_text()


def test_a_stopped_batcher_is_ended_and_replaced(tmp_path):
    with serve_fake(tmp_path, silence_seconds=5.0) as server, server.connect():
        former = server.child("server.batcher")
        os.kill(former, signal.SIGSTOP)
        fresh = server.connect().hello(GUARD)
        assert_works(fresh)
        fresh.socket.close(0)
        assert server.child("server.batcher") != former
        assert "the batcher sent no heartbeat for 5 s" in server.log.read_text()


def test_only_the_request_with_which_a_step_hangs_is_lost(tmp_path):
    """The others go on where they were, on the same connection: those that were in the step, one that does not stream,
    one that waits, and one that was aborted.
    """
    with (
        serve_fake(
            tmp_path, step_seconds=0.01, hang=250, step_timeout=6.0, max_num_seqs=5, max_model_len=8192, num_pages=256
        ) as server,
        server.connect() as wire,
    ):
        wire.submit("streams", LONG, prompt_token_ids=[1])
        wire.submit("whole", LONG, prompt_token_ids=[2], stream=False)
        wire.submit("two", TWO, prompt_token_ids=[3])
        wire.submit("scored", Sampling(temperature=0.0, ignore_eos=True, max_tokens=400, prompt_logprobs=1),
                    prompt_token_ids=[6] * 40, stream=False)  # fmt: skip
        wire.until(lambda: all(wire.answers[name].num_tokens > 2 for name in ("streams", "two")))
        wire.until(lambda: bool(wire.answers["scored"].chunks))
        wire.submit("waits", SHORT, prompt_token_ids=[4])
        wire.submit("gone", Sampling(temperature=0.0, ignore_eos=True, max_tokens=8000), prompt_token_ids=[5])
        first = server.child("fake_gpu")
        wire.submit("hangs", SHORT, prompt_token_ids=[1, 250, 250, 250], priority=-1)
        wire.until(lambda: server.health().status == "stalled", GUARD)
        wire.send(Abort(["gone"]))
        error = wire.answer("hangs", GUARD).error
        assert error.code == "request_failed" and error.retry_after is None
        assert "this request alone did not return within 6 s" in error.message
        for name, token, count in (("streams", 1, 400), ("whole", 2, 400), ("waits", 4, 6)):
            answer = wire.answer(name, GUARD)
            assert answer.error is None and answer.token_ids[0] == continuation([token], -1, count, 251), name
        assert [len(ids) for ids in wire.answer("two", GUARD).token_ids.values()] == [400, 400]
        scored = wire.answer("scored", GUARD).chunks
        assert sum(len(chunk.prompt_logprobs or ()) for chunk in scored) == 39, "each once"
        assert wire.answer("gone", GUARD).reasons == {0: "abort"}
        assert_works(wire)
        assert server.child("fake_gpu") != first
        assert "a step did not return within 6 s" in server.log.read_text()


def test_after_a_pause_of_everything_no_process_is_killed(tmp_path):
    """All three are stopped for longer than the silence limit; the supervisor continues first."""
    with (
        serve_fake(tmp_path, step_seconds=0.005, silence_seconds=3.0, step_timeout=3.0) as server,
        server.connect() as wire,
    ):
        wire.submit("a", LONG, prompt_token_ids=[1])
        wire.until(lambda: wire.answers["a"].num_tokens > 2)
        processes = [server.process.pid, server.child("server.batcher"), server.child("fake_gpu")]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        sleep(5.0)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        assert wire.answer("a", GUARD).token_ids[0] == continuation([1], -1, 400, 251)
        assert [server.process.pid, server.child("server.batcher"), server.child("fake_gpu")] == processes


def test_a_gpu_process_beats_while_its_main_thread_is_busy(tmp_path, monkeypatch):
    """A model that takes long to load is not a silent process."""
    mine, theirs = Channel.pair()
    beats: list[Any] = []

    def build(settings: Any) -> Any:
        while len(beats) < 2:
            beats.extend(message for message in mine.receive(block=True) if message == {"event": "beat"})
        raise ValueError("that is all")

    mine.send({"settings": {"model": "m", "directory": str(tmp_path)}})
    assert gpu_process.run(os.dup(theirs.fileno()), build) == 2
    assert any(message["event"] == "failed" for message in mine.receive())
