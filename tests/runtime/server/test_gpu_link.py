"""The two ends between the processes: order, and a partner that is not there yet or no more."""

import time

import numpy as np
import zmq
from sidestream.runtime.server.gpu_link import BatcherEnd, GpuEnd, Load, Ready, Retire, StepFailed, Timing
from sidestream.runtime.server.gpu_process import is_fatal, without_directories
from sidestream.runtime.steps.plan import StepDrafts, StepResult


def receive(end, timeout=60.0):
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if isinstance(end, BatcherEnd):
            end.flush()
        message = end.receive()
        if message is not None:
            return message
        time.sleep(0.005)
    raise TimeoutError


def test_what_is_sent_before_the_partner_connects_arrives_in_order(tmp_path):
    with zmq.Context() as context:
        batcher = BatcherEnd(context, tmp_path, 3)
        for number in range(50):
            batcher.tell(Retire(number))
        gpu = GpuEnd(context, tmp_path, 3)
        batcher.tell(Load(1, "a", "/x"))
        while batcher._backlog:
            batcher.flush()
        assert [receive(gpu) for _ in range(50)] == [Retire(number) for number in range(50)]
        assert receive(gpu) == Load(1, "a", "/x")
        reporters = [gpu.reporter(), gpu.reporter()]
        reporters[0].result(StepResult(4, np.asarray([1, 2], np.int32)), 10, 20)
        result, timing = receive(batcher)
        assert (
            result.tokens.tolist() == [1, 2]
            and isinstance(timing, Timing)
            and (timing.received, timing.launched) == (10, 20)
        )
        reporters[1].tell(StepFailed(5, "no"))
        assert receive(batcher) == StepFailed(5, "no")
        context.destroy(linger=0)


def test_drafts_are_taken_first_where_they_have_come_next(tmp_path):
    with zmq.Context() as context:
        batcher = BatcherEnd(context, tmp_path, 0)
        gpu = GpuEnd(context, tmp_path, 0)
        reporter = gpu.reporter()
        assert batcher.drafts() is None and not batcher.has_news
        for step in (3, 4):
            reporter.drafts(StepDrafts(step, np.asarray([[step, 5]], np.int32)))
            reporter.tell(StepFailed(step, "no"))
        assert receive(batcher).step == 3
        while not batcher.has_news:
            time.sleep(0.005)
        assert batcher.drafts() is None and batcher.drafts() is None and batcher.has_news
        assert receive(batcher) == StepFailed(3, "no")
        while (drafts := batcher.drafts()) is None:
            time.sleep(0.005)
        assert drafts.step == 4 and drafts.tokens.tolist() == [[4, 5]]
        assert receive(batcher) == StepFailed(4, "no") and batcher.receive() is None
        context.destroy(linger=0)


def test_a_partner_that_died_raises_nothing(tmp_path):
    with zmq.Context() as context, zmq.Context() as other:
        batcher = BatcherEnd(context, tmp_path, 0)
        gpu = GpuEnd(other, tmp_path, 0)
        batcher.tell(Retire(0))
        while batcher._backlog:
            batcher.flush()
        assert receive(gpu) == Retire(0)
        other.destroy(linger=0)
        for number in range(100):
            batcher.tell(Retire(number))
            time.sleep(0.001)
        assert batcher.receive() is None
        batcher.close()


def test_texts_for_clients_name_no_places():
    assert (
        without_directories("model.safetensors is missing from /srv/models/a-1/x_y: save it")
        == "model.safetensors is missing from x_y: save it"
    )
    assert without_directories("rank 3 and/or 4, ./here") == "rank 3 and/or 4, ./here"


def test_a_lost_device_is_told_from_a_failed_step():
    assert is_fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_fatal(RuntimeError("CUDA error: out of memory")) and not is_fatal(ValueError("shape"))
    assert Ready(1, 1, 64, 1, 1, 1, 0, [], []).prefix_caching
