"""A serving process collects cyclic garbage on a timer, for a small part of the time."""

import gc
import weakref

import pytest
from sidestream.runtime.processes.garbage_collection import INTERVAL_SECONDS, MIN_INTERVAL_FACTOR, PeriodicCollection


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_freed_at_each_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    garbage = PeriodicCollection(clock)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        knot = weakref.ref(Knot())
        clock.now += INTERVAL_SECONDS - 0.1
        assert not garbage.collect_if_due() and knot() is not None
        clock.now += 0.2
        assert garbage.collect_if_due() and knot() is None and not garbage.collect_if_due()
    finally:
        if was_enabled:
            gc.enable()


def test_slow_collections_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    garbage = PeriodicCollection(clock, clock)

    def slow() -> None:
        clock.now += 0.5

    monkeypatch.setattr("sidestream.runtime.processes.garbage_collection.gc.collect", slow)
    clock.now += INTERVAL_SECONDS
    assert garbage.collect_if_due()
    clock.now += 0.5 * MIN_INTERVAL_FACTOR - 1
    assert not garbage.collect_if_due()
    clock.now += 2
    assert garbage.collect_if_due()
