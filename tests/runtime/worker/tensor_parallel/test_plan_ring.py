"""Plans in shared memory: every reader gets every frame, whole and in order, and none is written over before that."""

import os
import random
import threading

import pytest
from sidestream.runtime.worker.tensor_parallel.plan_ring import PlanRing

READERS, CAPACITY = 3, 1000


def test_frames_arrive_whole_while_the_ring_goes_round() -> None:
    dice = random.Random(0)
    frames = [dice.randbytes(dice.choice([1, 7, 400, 999, CAPACITY])) for _ in range(200)]
    ring = PlanRing.create(READERS, CAPACITY)
    ends = [PlanRing(os.dup(ring.fd), READERS, CAPACITY) for _ in range(READERS)]
    written = [threading.Semaphore(0) for _ in ends]
    got: list[list[bytes]] = [[] for _ in ends]

    def read(reader: int) -> None:
        for frame in frames:
            written[reader].acquire()
            got[reader].append(bytes(ends[reader].read(reader, len(frame))))

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(READERS)]
    for thread in threads:
        thread.start()
    for frame in frames:
        ring.write(frame, lambda: None)
        for each in written:
            each.release()
    for thread in threads:
        thread.join()
    assert got == [frames] * READERS
    for each in (ring, *ends):
        each.close()


def test_who_waits_for_a_reader_that_is_gone_is_told() -> None:
    ring = PlanRing.create(1, CAPACITY)
    ring.write(bytes(600), lambda: None)

    def gone() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        ring.write(bytes(600), gone)
    with pytest.raises(ValueError, match="1001 bytes is longer than the 1000"):
        ring.write(bytes(CAPACITY + 1), gone)
    ring.close()
