"""Steps are shared fairly between owners: one that asks for much does not keep another waiting."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.waiting_queue import MAX_DEBT, WaitingQueues
from support.engines import VOCABULARY, assert_idle, make_engine, prompt, run
from support.fake_runner import continuation

PATIENCE = 32
"""`SchedulerLimits.owner_patience`."""


def ask(engine: Engine, name: str, owner: str, length: int, tokens: int, adapter: str | None = None) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    ids = prompt(length, sum(map(ord, name)))
    engine.add(Request(name, None, ids, params, adapter, owner=owner), stream=True)


def steps_until(engine: Engine, name: str) -> int:
    """Steps until a request has its first token."""
    for step in range(1, 5000):
        deltas, _ = engine.step()
        if any(delta.request_id == name for delta in deltas):
            return step
    raise AssertionError(f"{name} never began")


def assert_right(engine: Engine, asked: dict[str, tuple[int, int]]) -> None:
    """Runs to the end: every answer is that of its prompt alone."""
    outputs = run(engine)
    for name, (length, tokens) in asked.items():
        expected = continuation(prompt(length, sum(map(ord, name))), -1, tokens, VOCABULARY)
        assert outputs[name].outputs[0].token_ids == expected
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [400, 30], ids=["rows are short", "pages are short"])
def test_sixteen_long_streams_of_one_client_do_not_keep_another_waiting(overlap, pages):
    engine = make_engine(pages=pages, max_model_len=640, max_num_seqs=4, overlap=overlap)
    asked = {f"greedy{index:02}": (100, 250) for index in range(16)}
    for name, (length, tokens) in asked.items():
        ask(engine, name, "greedy", length, tokens)
    for _ in range(20):
        engine.step()
    asked["other"] = 50, 5
    ask(engine, "other", "other", 50, 5)
    assert steps_until(engine, "other") <= PATIENCE + 10
    assert_right(engine, asked)


def test_rows_end_up_shared_and_then_stay_where_they_are():
    engine = make_engine(pages=400, max_num_seqs=8)
    asked = {f"{owner}{index}": (20, 400) for owner in "abc" for index in range(8)}
    for name, (length, tokens) in asked.items():
        ask(engine, name, name[0], length, tokens)
    running = engine.scheduler.states.running
    for _ in range(300):
        engine.step()
    shares = sorted(sum(sequence.owner == owner for sequence in running) for owner in "abc")
    assert shares == [2, 3, 3]
    preemptions = engine.scheduler.stats().preemptions
    for _ in range(2 * PATIENCE):
        engine.step()
    assert engine.scheduler.stats().preemptions == preemptions
    assert_right(engine, asked)


def test_one_owner_keeps_its_rows():
    engine = make_engine(pages=400, max_num_seqs=2)
    asked = {f"{index}": (20, 200) for index in range(6)}
    for name, (length, tokens) in asked.items():
        ask(engine, name, "same", length, tokens)
    assert_right(engine, asked)
    assert engine.scheduler.stats().preemptions == 0


def test_long_prompts_of_one_client_leave_room_in_the_step_for_another():
    engine = make_engine(pages=400, max_model_len=2000, budget=64)
    for index in range(4):
        ask(engine, f"greedy{index}", "greedy", 1500, 4)
    engine.step()
    ask(engine, "other", "other", 30, 4)
    assert steps_until(engine, "other") <= 2


def test_prompt_chunks_go_by_owner_in_turn():
    engine = make_engine(pages=400, max_model_len=2000, budget=64)
    for index in range(3):
        ask(engine, f"greedy{index}", "greedy", 1500, 4)
    engine.step()
    ask(engine, "other", "other", 640, 4)
    # ten chunks of its own, and as many of the greedy one's between them
    assert steps_until(engine, "other") <= 24


def test_a_client_of_many_adapters_has_no_larger_share():
    engine = make_engine(pages=400, max_num_seqs=2, slots=8, adapters=8)
    for index in range(8):
        for count in range(4):
            ask(engine, f"greedy{index}{count}", "greedy", 20, 30, f"adapter{index}")
    for _ in range(10):
        engine.step()
    ask(engine, "other", "other", 20, 4, "adapter0")
    assert steps_until(engine, "other") <= PATIENCE + 10


def test_an_owner_that_was_served_for_hours_waits_for_a_bounded_number_of_tokens():
    """The other one had a sequence all the time, but few tokens: it must not be first until it has as many."""
    queues, arrivals = WaitingQueues(), itertools.count()

    def enter(owner: str, queued: bool = True) -> Any:
        arrival = next(arrivals)
        made = SimpleNamespace(owner=owner, number=-1, priority=0, arrival=arrival, order=(0, arrival), finished=False)
        queues.enter(made, queued)
        return made

    busy, slow = enter("busy", False), enter("slow", False)
    queues.charge(busy, 50 * MAX_DEBT)
    queues.charge(slow, 10)
    for _ in range(200):
        enter("slow")
    enter("busy")
    served = 0
    while (first := queues.turns()[0][-1])[0] == "slow":
        queues.charge(queues.pop(first), 1000)
        served += 1000
    assert MAX_DEBT - 1000 <= served <= MAX_DEBT + 1000
