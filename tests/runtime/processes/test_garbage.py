"""A serving process looks for garbage by the clock, for a small part of the time."""

import gc
import weakref

import pytest
from sidestream.runtime.processes.garbage import MOST_OF_TIME, OFTEN_SECONDS, GarbageLook


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_go_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    garbage = GarbageLook(clock)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        knot = weakref.ref(Knot())
        clock.now += OFTEN_SECONDS - 0.1
        assert not garbage.look() and knot() is not None
        clock.now += 0.2
        assert garbage.look() and knot() is None and not garbage.look()
    finally:
        if was_enabled:
            gc.enable()


def test_long_looks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    garbage = GarbageLook(clock)

    def slow() -> None:
        clock.now += 0.5

    monkeypatch.setattr("sidestream.runtime.processes.garbage.gc.collect", slow)
    clock.now += OFTEN_SECONDS
    assert garbage.look()
    clock.now += 0.5 * MOST_OF_TIME - 1
    assert not garbage.look()
    clock.now += 2
    assert garbage.look()
