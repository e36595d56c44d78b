"""Small engines over fake runners, driven to their end."""

import random
from collections.abc import Mapping

from sidestream.runtime.api.outputs import RequestOutput
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.scheduler import Scheduler, SchedulerLimits

from .exact_runner import ExactFakeRunner
from .fake_runner import FakeRunner, LoadingFakeRunner
from .following_runner import FollowingFakeRunner

VOCABULARY = 97


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    pages=40,
    max_model_len=640,
    max_num_seqs=8,
    budget=64,
    slots=0,
    adapters=0,
    overlap=False,
    eos=(),
    prefix_caching=True,
    patience=128,
    hashes=None,
    asynchronous=False,
    clock=None,
    speculation="off",
    step_times=(),
    history=40,
    invocations=None,
    host_pages=0,
    disk_pages=0,
    disk_prefix="",
    exact=False,
    kv_role="",
    cascade=(0, 0),
    **loading,
) -> Engine:
    """`adapters` many adapters, adapter0 with number 0 and so on; `asynchronous` copies them while steps run
    (`loading`: see LoadingFakeRunner, and with `speculation` FollowingFakeRunner). `history`: tokens of a ring of
    answers. `exact`: with an ExactFakeRunner. `cascade`: cascade_tile and cascade_pages.
    """
    numbers = {f"adapter{index}": index for index in range(adapters)}
    limits = SchedulerLimits(
        pages,
        max_model_len,
        max_num_seqs,
        budget,
        slots,
        prefix_caching,
        patience,
        speculation=speculation,
        step_times=step_times,
        speculation_history=history,
        host_pages=host_pages,
        disk_pages=disk_pages,
        disk_prefix=str(disk_prefix),
        exact=exact,
        kv_role=kv_role,
        cascade_tile=cascade[0],
        cascade_pages=cascade[1],
    )
    scheduler = Scheduler(limits, numbers, hashes, invocations, asynchronous_loads=asynchronous, clock=clock or Clock())
    runner: FakeRunner
    if speculation != "off":
        runner = FollowingFakeRunner(pages, slots, VOCABULARY, ring_tokens=history, **loading)
    elif exact:
        runner = ExactFakeRunner(pages, slots, VOCABULARY, **loading)
    else:
        runner = (LoadingFakeRunner if asynchronous else FakeRunner)(pages, slots, VOCABULARY, **loading)
    return Engine(scheduler, runner, None, eos, overlap=overlap)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Prompts of different seeds differ from their first token on."""
    return [(seed * 31 + index * 7) % VOCABULARY for index in range(length)]


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(length)]


def greedy(count: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **fields)


def ask(
    engine: Engine, name: str, ids: list[int], count: int, adapter: str | None = None, stream: bool = False, **fields
) -> None:
    """One greedy request."""
    engine.add(Request(name, None, ids, greedy(count), adapter, **fields), stream)


def run(engine: Engine, limit: int = 20000) -> dict[str, RequestOutput]:
    """Steps until nothing is left."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step()[1]:
            outputs[output.request_id] = output
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: Mapping[str, RequestOutput]) -> dict[str, list[int]]:
    """Each request's first completion."""
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def assert_idle(engine: Engine) -> None:
    """Nothing is held by anybody."""
    scheduler = engine.scheduler
    assert scheduler.states.pages.num_free == scheduler.limits.num_pages, "pages leaked"
    assert not any(scheduler.states.pages._references)
    assert scheduler.states.rows.num_free == scheduler.limits.max_num_seqs, "rows leaked"
    assert not scheduler.states.running and not scheduler.has_work and not scheduler.states.slots.draining_order()
    waiting = scheduler.states.waiting
    assert not scheduler._issued and not waiting.num_owners and not waiting._adapters.served
    used = scheduler.states.slots.resident.values()
    assert (
        len(used) + scheduler.states.slots.num_loading + len(scheduler.states.slots._free) == scheduler.limits.num_slots
    ), "slots leaked"
