"""The link between batcher and GPU process: order, and a partner that has not started or has ended."""

import errno
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from sidestream.runtime.scheduler.step_plan import StepDrafts, StepMasks, StepResult
from sidestream.runtime.server.gpu_link import BatcherLink, GpuLink, Load, Ready, Retire, StepFailed, Timing
from sidestream.runtime.server.gpu_process import is_fatal, without_directories
from sidestream.runtime.server.shared_masks import SharedMasks


def receive(end, timeout=60.0):
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if isinstance(end, BatcherLink):
            end.flush()
        message = end.receive()
        if message is not None:
            return message
        time.sleep(0.005)
    raise TimeoutError


def test_what_is_sent_before_the_partner_connects_arrives_in_order(tmp_path):
    with zmq.Context() as context:
        batcher = BatcherLink(context, tmp_path, 3)
        for number in range(50):
            batcher.send(Retire(number))
        gpu = GpuLink(context, tmp_path, 3)
        batcher.send(Load(1, "a", "/x"))
        while batcher._backlog:
            batcher.flush()
        assert [receive(gpu) for _ in range(50)] == [Retire(number) for number in range(50)]
        assert receive(gpu) == Load(1, "a", "/x")
        senders = [gpu.sender(), gpu.sender()]
        senders[0].send_result(StepResult(4, np.asarray([1, 2], np.int32)), 10, 20)
        result, timing = receive(batcher)
        assert (
            result.tokens.tolist() == [1, 2]
            and isinstance(timing, Timing)
            and (timing.received, timing.launched) == (10, 20)
        )
        senders[1].send(StepFailed(5, "no"))
        assert receive(batcher) == StepFailed(5, "no")
        context.destroy(linger=0)


def test_receive_drafts_returns_drafts_if_they_are_next(tmp_path):
    with zmq.Context() as context:
        batcher = BatcherLink(context, tmp_path, 0)
        gpu = GpuLink(context, tmp_path, 0)
        sender = gpu.sender()
        assert batcher.receive_drafts() is None and not batcher.has_input
        for step in (3, 4):
            sender.send_drafts(StepDrafts(step, np.asarray([[step, 5]], np.int32)))
            sender.send(StepFailed(step, "no"))
        assert receive(batcher).step == 3
        while not batcher.has_input:
            time.sleep(0.005)
        assert batcher.receive_drafts() is None and batcher.receive_drafts() is None and batcher.has_input
        assert receive(batcher) == StepFailed(3, "no")
        while (drafts := batcher.receive_drafts()) is None:
            time.sleep(0.005)
        assert drafts.step == 4 and drafts.tokens.tolist() == [[4, 5]]
        assert receive(batcher) == StepFailed(4, "no") and batcher.receive() is None
        context.destroy(linger=0)


def random_masks(source, rows, words):
    return source.integers(-(2**31), 2**31, (rows, words), np.int32)


@pytest.mark.parametrize("path", ["shared", "", "/nowhere"])
def test_masks_arrive_unchanged(tmp_path, path, caplog):
    """Masks in shared memory, also of every second row or part of a row, and other masks."""
    source = np.random.default_rng(0)
    with zmq.Context() as context:
        batcher, gpu = BatcherLink(context, tmp_path, 0), GpuLink(context, tmp_path, 0)
        shared = gpu.share_masks(8, 40)
        memory = batcher.open_masks(shared if path == "shared" else path)
        assert (memory is None) == (path != "shared")
        assert ("masks are sent as messages" in caplog.text) == (path == "/nowhere")
        for step, count in enumerate((8, 1, 9, 3, 0)):
            room = np.empty((count, 40), np.int32)
            if memory is not None and count and (placed := memory.allocate(count, 40)) is not None:
                assert count <= 8
                room = placed
            room[:] = random_masks(source, count, 40)
            words, rows = room[::-1][: 1 + step][::-1][:, :37], np.arange(min(count, 1 + step), dtype=np.int32)
            batcher.constrain(StepMasks(step, rows, rows + 5, words))
            while batcher._backlog:
                batcher.flush()
            got = receive(gpu)
            assert got.step == step and np.array_equal(got.words, words)
            assert np.array_equal(got.rows, rows) and np.array_equal(got.places, rows + 5)
            assert np.shares_memory(got.words, gpu._masks._bytes) == (path == "shared" and count in (8, 1, 3))
        context.destroy(linger=0)


def test_masks_are_read_within_the_shared_memory_only():
    memory = SharedMasks.create(4, 10)
    assert memory.allocate(5, 10) is None and memory.find(np.zeros((1, 10), np.int32)) is None
    for place in ((0, 40, 9, 10), (-4, 40, 1, 10), (0, 36, 1, 10), (290, 40, 1, 10), (0, 40, -1, 10)):
        with pytest.raises(ValueError, match="exceed the 320 shared bytes"):
            memory.masks(*place)
    first, second = memory.allocate(4, 10), memory.allocate(4, 10)
    assert not np.shares_memory(first, second) and memory.find(first[1:]) == (200, 40)
    mapped = Path("/proc/self/maps").read_text().count("sidestream-masks")
    other = SharedMasks.open(memory.path)
    assert Path("/proc/self/maps").read_text().count("sidestream-masks") == mapped + 1
    other.close()
    assert other.allocate(1, 1) is None and other.find(first) is None
    assert Path("/proc/self/maps").read_text().count("sidestream-masks") == mapped


def test_without_shared_memory_masks_are_sent_as_messages(tmp_path, monkeypatch, caplog):
    """As where a process may make no files of this size."""

    made = []

    def full(fd, size):
        made.append(fd)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("sidestream.runtime.server.shared_masks.os.truncate", full)
    monkeypatch.setattr("sidestream.runtime.server.shared_masks.os.close", made.remove)
    with zmq.Context() as context:
        batcher, gpu = BatcherLink(context, tmp_path, 0), GpuLink(context, tmp_path, 0)
        path = gpu.share_masks(4, 10)
        assert path == "" and batcher.open_masks(path) is None and "masks are received as messages" in caplog.text
        assert not made, "its descriptor is closed"
        context.destroy(linger=0)


def test_a_partner_that_died_raises_nothing(tmp_path):
    with zmq.Context() as context, zmq.Context() as other:
        batcher = BatcherLink(context, tmp_path, 0)
        gpu = GpuLink(other, tmp_path, 0)
        batcher.send(Retire(0))
        while batcher._backlog:
            batcher.flush()
        assert receive(gpu) == Retire(0)
        other.destroy(linger=0)
        for number in range(100):
            batcher.send(Retire(number))
            time.sleep(0.001)
        assert batcher.receive() is None
        batcher.close()


def test_texts_for_clients_have_no_directories():
    assert (
        without_directories("model.safetensors is missing from /srv/models/a-1/x_y: save it")
        == "model.safetensors is missing from x_y: save it"
    )
    assert without_directories("rank 3 and/or 4, ./here") == "rank 3 and/or 4, ./here"


def test_a_lost_device_differs_from_a_failed_step():
    assert is_fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_fatal(RuntimeError("CUDA error: out of memory")) and not is_fatal(ValueError("shape"))
    assert Ready(1, 1, 64, 1, 1, 1, 0, [], []).prefix_caching
