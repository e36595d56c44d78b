"""The end of the GPU process: its threads have ended when the interpreter ends."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq
from sidestream.runtime.processes.channel import Channel, ChannelClosed
from sidestream.runtime.scheduler.step_plan import PageCopies, StepDrafts, StepMasks, StepPlan, StepResult
from sidestream.runtime.server import gpu_process
from sidestream.runtime.server.gpu_link import (
    BatcherLink,
    CopyPages,
    Load,
    LoadedAdapter,
    LoadReply,
    PagesCopied,
    Ready,
    Retire,
    StartLoad,
)
from sidestream.runtime.server.gpu_process import run
from sidestream.runtime.server.settings import ServeSettings
from support.sampling_plans import plan, sampling
from support.serving import GUARD


class SlowReader:
    """A model that reads adapters slowly."""

    ready = Ready(97, 8, 64, 512, 4, 512, 2, [1], [])
    runner = SimpleNamespace(loaded=list)
    in_host_memory = staticmethod(list)

    def __init__(self):
        self.started, self.ended = [], []
        self.reading, self.may_end = threading.Event(), threading.Event()

    def add_adapter(self, name, path, replace):
        self.started.append(name)
        self.reading.set()
        assert self.may_end.wait(GUARD)
        time.sleep(0.2)  # meanwhile the process continues to its end
        self.ended.append(name)
        return LoadedAdapter(name, len(self.ended), 8, "hash")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_ends_after_the_adapter_that_is_being_read_and_reads_no_other(tmp_path, monkeypatch):
    served, codes = SlowReader(), []

    class Watched(Channel):
        """Lets the reader continue when the process notices the end of its supervisor."""

        def receive(self, *arguments, **options):
            try:
                return super().receive(*arguments, **options)
            except ChannelClosed:
                served.may_end.set()
                raise

    monkeypatch.setattr(gpu_process, "Channel", Watched)
    monkeypatch.setattr(gpu_process, "END_SECONDS", GUARD)
    channel, theirs = Channel.pair()
    process = threading.Thread(target=lambda: codes.append(run(theirs.detach(), lambda settings: served)))
    process.start()
    channel.send({"settings": msgspec.to_builtins(ServeSettings(model="none", directory=str(tmp_path)))})
    with zmq.Context() as context:
        batcher = BatcherLink(context, tmp_path, 0)
        for ticket in range(3):
            batcher.send(Load(ticket, f"a{ticket}", "/adapters"))
        deadline = time.monotonic() + GUARD
        while not served.reading.wait(0.01) and time.monotonic() < deadline:
            batcher.flush()
        received = [batcher.receive() for _ in range(100)]
        assert not any(isinstance(message, LoadReply) for message in received)  # it is still being read
        channel.close()
        process.join(GUARD)
        batcher.close()
        context.destroy(linger=0)
    assert codes == [0]
    assert served.started == served.ended == ["a0"]


class Forgetful(SlowReader):
    """A runner that drafts but raises when its drafts are read."""

    def __init__(self):
        self.runner = self
        self.done = []

    def loaded(self):
        return []

    def submit(self, plan):
        self.done.append(("submit", plan.step))
        return plan.step

    def drafts(self, handle):
        raise RuntimeError("out of memory")

    def constrain(self, handle, masks):
        self.done.append(("constrain", masks.step))

    def collect(self, handle):
        return StepResult(handle, np.zeros(2, np.int32), accepted=np.zeros(1, np.int32))


def drafting_plan(step: int) -> StepPlan:
    """Of one constrained sequence with a draft."""
    one = np.ones(1, np.int32)
    return replace(plan(sampling(2)), step=step, masked_rows=one - 1, follow_rows=one - 1, drafts=one)


def test_a_step_whose_drafts_cannot_be_read_is_sampled_without_them(tmp_path):
    served, (channel, theirs) = Forgetful(), Channel.pair()
    process = threading.Thread(target=lambda: run(theirs.detach(), lambda settings: served))
    process.start()
    channel.send({"settings": msgspec.to_builtins(ServeSettings(model="none", directory=str(tmp_path)))})
    with zmq.Context() as context:
        batcher = BatcherLink(context, tmp_path, 0)
        batcher.submit(drafting_plan(0))
        batcher.submit(drafting_plan(1))
        received, deadline = [], time.monotonic() + GUARD
        while len(received) < 4 and time.monotonic() < deadline:
            batcher.flush()
            message = batcher.receive()
            if isinstance(message, StepDrafts):
                assert message.tokens.size == 0
                batcher.constrain(StepMasks(message.step, *[np.zeros(0, np.int32)] * 2, np.zeros((0, 1), np.int32)))
            if isinstance(message, (StepDrafts, tuple)):
                received.append(message.step if isinstance(message, StepDrafts) else message[0].step)
            time.sleep(0.002)
        channel.close()
        process.join(GUARD)
        batcher.close()
        context.destroy(linger=0)
    assert received == [0, 0, 1, 1]
    assert served.done == [("submit", 0), ("constrain", 0), ("submit", 1), ("constrain", 1)]


def test_an_adapter_is_kept_while_an_earlier_plan_waits_for_masks(tmp_path):
    served = Forgetful()
    served.forget_adapter = lambda number: served.done.append(("forget", number))
    channel, theirs = Channel.pair()
    process = threading.Thread(target=lambda: run(theirs.detach(), lambda settings: served))
    process.start()
    channel.send({"settings": msgspec.to_builtins(ServeSettings(model="none", directory=str(tmp_path)))})
    with zmq.Context() as context:
        batcher = BatcherLink(context, tmp_path, 0)
        masked = replace(plan(sampling(2)), step=0, masked_rows=np.zeros(1, np.int32))
        batcher.submit(masked)
        batcher.submit(replace(masked, step=1, masked_rows=np.zeros(0, np.int32)))
        batcher.send(Retire(7))
        batcher.constrain(StepMasks(0, np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones((1, 4), np.int32)))
        deadline = time.monotonic() + GUARD
        while len(served.done) < 4 and time.monotonic() < deadline:
            batcher.flush()
            time.sleep(0.01)
        channel.close()
        process.join(GUARD)
        batcher.close()
        context.destroy(linger=0)
    assert served.done == [("submit", 0), ("constrain", 0), ("submit", 1), ("forget", 7)]


def test_the_end_of_the_supervisor_is_no_error(tmp_path):
    """It ended because the other process could not start, and has reported that."""
    channel, theirs = Channel.pair()
    settings = ServeSettings(model="fake", directory=str(tmp_path))
    channel.send({"settings": msgspec.to_builtins(settings)})

    def build(_):
        channel.close()
        return SlowReader()

    assert run(theirs.detach(), build) == 1


def test_the_process_ends_without_the_interpreters_clean_up() -> None:
    """A thread that imports torch's compiler when it is taken away prints a traceback, or aborts."""
    program = """
import atexit, sys
from sidestream.runtime.server import gpu_process
atexit.register(lambda: print("clean-up"))
gpu_process.run = lambda fd: print("served", fd) or 3
sys.argv[1:] = ["7"]
gpu_process.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "served 7\n"), ended.stderr


class Loading(Forgetful):
    """A runner whose steps take until the next plans are there, as on a CPU; a load ends at once."""

    def __init__(self):
        super().__init__()
        self.all_sent = threading.Event()

    def start_load(self, slot, number):
        self.done.append(("load", number))

    def loaded(self):
        self.done.append(("loaded", 0))
        return []

    def submit(self, plan):
        assert self.all_sent.wait(GUARD)
        return super().submit(plan)


def test_ended_loads_are_noticed_between_plans_that_follow_each_other(tmp_path):
    served, (channel, theirs) = Loading(), Channel.pair()
    process = threading.Thread(target=lambda: run(theirs.detach(), lambda settings: served))
    process.start()
    channel.send({"settings": msgspec.to_builtins(ServeSettings(model="none", directory=str(tmp_path)))})
    with zmq.Context() as context:
        batcher, deadline = BatcherLink(context, tmp_path, 0), time.monotonic() + GUARD
        batcher.send(StartLoad(0, 7))
        for step in range(100):
            batcher.submit(replace(plan(sampling(2)), step=step))
        while ("load", 7) not in served.done and time.monotonic() < deadline:
            batcher.flush()
            time.sleep(0.002)
        batcher.flush()
        time.sleep(0.2)  # the plans are in the socket now
        served.all_sent.set()
        while ("submit", 99) not in served.done and time.monotonic() < deadline:
            batcher.flush()
            time.sleep(0.002)
        channel.close()
        process.join(GUARD)
        batcher.close()
        context.destroy(linger=0)
    steps = served.done[served.done.index(("submit", 0)) : served.done.index(("submit", 99))]
    assert steps.count(("loaded", 0)) > 5


class Copying(Forgetful):
    """A runner that copies pages at once."""

    def copy_pages(self, copies):
        self.done.append(("copy", copies.ticket))

    def copied(self):
        return [(copies, "no memory") for what, copies in self.done if what == "copy"]


def test_pages_are_copied_between_the_plans_before_and_after(tmp_path):
    """also while a plan waits for the masks of the step before it"""
    served, (channel, theirs) = Copying(), Channel.pair()
    process = threading.Thread(target=lambda: run(theirs.detach(), lambda settings: served))
    process.start()
    channel.send({"settings": msgspec.to_builtins(ServeSettings(model="none", directory=str(tmp_path)))})
    with zmq.Context() as context:
        batcher = BatcherLink(context, tmp_path, 0)
        batcher.submit(replace(drafting_plan(0), drafts=np.zeros(1, np.int32)))
        batcher.send(CopyPages(PageCopies(7, [(1, 2)], [(3, 4)])))
        batcher.submit(replace(plan(sampling(2)), step=1))
        batcher.constrain(StepMasks(0, *[np.zeros(0, np.int32)] * 2, np.zeros((0, 1), np.int32)))
        received, deadline = [], time.monotonic() + GUARD
        while not received and time.monotonic() < deadline:
            batcher.flush()
            message = batcher.receive()
            if isinstance(message, PagesCopied):
                received.append((message.ticket, message.problem))
            time.sleep(0.002)
        channel.close()
        process.join(GUARD)
        batcher.close()
        context.destroy(linger=0)
    assert served.done == [("submit", 0), ("constrain", 0), ("copy", 7), ("submit", 1)]
    assert received == [(7, "no memory")]
