"""Order of a start on a GPU: programs are built, then their kernels are compiled, then they are captured."""

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sidestream.compiler.program.program import Bucket
from sidestream.runtime.worker import model_runner
from sidestream.runtime.worker.buckets import Buckets
from sidestream.runtime.worker.model_runner import CAPTURE_TOKENS, ModelRunner
from sidestream.runtime.worker.programs.bound_programs import BoundPrograms

BUCKETS = Buckets(16, 4096, 8, 8, lora=True)
MIXED, DECODE, LATER = BUCKETS.warm_up_buckets(), BUCKETS.captured_buckets(), BUCKETS.later_buckets()
Events = list[tuple[str, Any]]


class Ahead(AbstractContextManager["Ahead"]):
    """Records which programs' kernels are compiled by the end of the context."""

    def __init__(self, events: Events) -> None:
        self.events, self.added = events, list[Bucket]()

    def add(self, bound: Any) -> None:
        self.events.append(("add", bound.bucket))
        self.added.append(bound.bucket)

    def call(self, function: object) -> None:
        self.events.append(("call", None))

    def __exit__(self, *error: object) -> None:
        self.events += [("compiled", bucket) for bucket in self.added]


class Runner(ModelRunner):
    """A runner of a GPU whose programs record what happens to them."""

    def __init__(self, events: Events, captures: bool) -> None:
        self.events, self.captures, self.buckets = events, captures, BUCKETS
        self.device = cast(Any, SimpleNamespace(type="cuda"))
        self.compiled = cast(Any, SimpleNamespace(missing_programs=lambda buckets: [], keep=None))
        self.slot_loader = self.token_history = self.trained_draft = None
        self._sampler = cast(Any, SimpleNamespace(warm_up=print))
        self.programs = BoundPrograms()

    def _make_program(self, bucket: Bucket) -> Any:
        self.events.append(("bound", bucket))
        bound = SimpleNamespace(bucket=bucket, prepare=lambda: self.events.append(("prepared", bucket)))
        return SimpleNamespace(all_bound=[bound], logits=None, bucket=bucket)

    def _capture(self, program: Any) -> None:
        self.events.append(("captured", program.bucket))


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("num_queues", [0, 2])
def test_programs_are_captured_when_their_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, num_queues: int, captures: bool
) -> None:
    events: Events = []
    monkeypatch.setattr(model_runner, "KernelsAhead", lambda device: Ahead(events))
    processes: Any = SimpleNamespace(
        num_queues=num_queues,
        wait=lambda bucket: events.append(("built", bucket)),
        wait_for_kernels=lambda queues: events.append(("in the cache", queues)),
    )
    Runner(events, captures).warm_up(processes=processes)
    place = {event: position for position, event in enumerate(events)}
    ready = "captured" if captures else "prepared"
    for bucket in (*MIXED, *DECODE):
        done = "prepared" if bucket.tokens > CAPTURE_TOKENS else ready  # it runs longer than its launch takes
        order = [place["built", bucket], place["bound", bucket], place["add", bucket], place["compiled", bucket]]
        assert order == sorted(order) and place[done, bucket] > order[-1]
        if num_queues:
            assert place["add", bucket] > place["in the cache", 1 if bucket in DECODE else 2]
    if num_queues:
        assert all(place[ready, bucket] < place["in the cache", 2] for bucket in DECODE), "while others compile"
    assert LATER and all(("built", bucket) in place for bucket in LATER)
