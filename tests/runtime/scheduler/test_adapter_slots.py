"""Adapters come and go while steps run: nobody waits for another's copy, no slot in use is touched, nobody is
starved.
"""

import os
import random

import pytest
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Request
from support.engines import VOCABULARY, ask, assert_idle, greedy, make_engine, prompt, run, tokens
from support.fake_runner import continuation


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cold_adapter_does_not_stall_the_others(overlap):
    engine = make_engine(slots=2, adapters=2, overlap=overlap, asynchronous=True, delay=lambda number: 2 + 30 * number)
    ask(engine, "warm", prompt(9), 60, "adapter0", stream=True)
    ask(engine, "base", prompt(5), 60, stream=True)
    for _ in range(6):
        engine.step()
    ask(engine, "cold", prompt(7), 4, "adapter1", stream=True)
    for _ in range(25):
        deltas, _ = engine.step()
        assert {delta.request_id for delta in deltas} == {"warm", "base"}, "a token each, in every step"
    outputs = tokens(run(engine))
    assert outputs == {
        "warm": continuation(prompt(9), 0, 60, VOCABULARY),
        "base": continuation(prompt(5), -1, 60, VOCABULARY),
        "cold": continuation(prompt(7), 1, 4, VOCABULARY),
    }
    assert_idle(engine)


def test_a_copy_starts_at_arrival_even_if_the_request_cannot():
    engine = make_engine(slots=2, adapters=2, max_num_seqs=1, asynchronous=True)
    ask(engine, "a", prompt(9), 30)
    engine.step()
    ask(engine, "b", prompt(9), 3, "adapter1")
    assert engine.runner.started == 1 and not engine.runner.prefetched, "the only row is taken, a slot is not"
    run(engine)
    assert engine.scheduler.stats().waiting_for_adapters == 0
    ask(engine, "c", prompt(9, 1), 3, "adapter1")
    run(engine)
    assert engine.runner.started == 1 and not engine.runner.prefetched, "resident by now"


def test_without_a_slot_it_is_brought_into_host_memory():
    engine = make_engine(slots=1, adapters=2, asynchronous=True)
    ask(engine, "a", prompt(9), 30, "adapter0")
    for _ in range(5):
        engine.step()
    ask(engine, "b", prompt(9), 3, "adapter1")
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.waiting, stats.waiting_for_adapters) == (1, 1)
    assert engine.runner.prefetched[-1] == 1 and engine.runner.started == 1
    assert tokens(run(engine))["b"] == continuation(prompt(9), 1, 3, VOCABULARY)


def test_a_failed_load_ends_its_own_requests_only():
    engine = make_engine(slots=2, adapters=2, asynchronous=True, failing={1: "adapter 'adapter1': its files are gone"})
    ask(engine, "good", prompt(9), 20, "adapter0")
    ask(engine, "bad", prompt(9), 20, "adapter1", stream=True)
    ask(engine, "worse", prompt(3), 20, "adapter1")
    deltas, outputs = [], {}
    while engine.has_work:
        some, done = engine.step()
        deltas += some
        outputs |= {output.request_id: output.outputs[0] for output in done}
    assert outputs["good"].token_ids == continuation(prompt(9), 0, 20, VOCABULARY)
    assert {(outputs[name].finish_reason, outputs[name].stop_reason) for name in ("bad", "worse")} == {
        ("error", "adapter 'adapter1': its files are gone")
    }
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [("bad", "error")]
    assert_idle(engine)
    engine.runner.failing.clear()
    ask(engine, "later", prompt(9), 5, "adapter1")
    assert tokens(run(engine))["later"] == continuation(prompt(9), 1, 5, VOCABULARY), "the next request tries again"
    assert engine.scheduler.stats().adapter_failures == 1
    assert_idle(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_answer_does_not_keep_a_slot_for_ever(overlap, asynchronous):
    engine = make_engine(pages=60, slots=1, adapters=2, overlap=overlap, asynchronous=asynchronous, patience=20)
    ask(engine, "long", prompt(9), 500, "adapter0")
    for _ in range(5):
        engine.step()
    ask(engine, "short", prompt(9), 5, "adapter1")
    finished = []
    for step in range(20000):
        finished += [(output.request_id, step, output.outputs[0].token_ids) for output in engine.step()[1]]
        if not engine.has_work:
            break
    (first, at, short), (second, _, long) = finished
    assert (first, second) == ("short", "long") and at < 45
    assert short == continuation(prompt(9), 1, 5, VOCABULARY) and long == continuation(prompt(9), 0, 500, VOCABULARY)
    stats = engine.scheduler.stats()
    assert stats.preemptions == 1 and engine.runner.computed < 9 + 500 + 9 + 5 + 130, (
        "what the preempted one had computed is found again"
    )
    assert_idle(engine)


def test_a_popular_adapter_does_not_starve_another():
    engine = make_engine(pages=200, slots=2, adapters=2, max_num_seqs=4, budget=64, asynchronous=True)
    for index in range(100):
        ask(engine, f"popular{index}", prompt(20, index), 10, "adapter0")
    for _ in range(10):
        engine.step()
    ask(engine, "rare", prompt(20, 200), 10, "adapter1")
    order = list(run(engine))
    assert order.index("rare") < 12, "the backlog of another adapter does not come first"
    assert_idle(engine)


def test_shares_are_equal_while_both_have_a_backlog():
    engine = make_engine(pages=200, slots=3, adapters=3, max_num_seqs=4, budget=64)
    for index in range(60):
        for adapter, many in (("adapter0", 3), ("adapter1", 1)):
            for copy in range(many):
                ask(engine, f"{adapter}-{index}-{copy}", prompt(20, 3 * index + copy), 8, adapter)
    done = [name.split("-")[0] for name in run(engine)][:80]
    assert abs(done.count("adapter0") - done.count("adapter1")) <= 6


def test_priority_comes_before_arrival_and_takes_rows_and_pages():
    engine = make_engine(pages=12, max_num_seqs=2, max_model_len=500)
    for name in "ab":
        ask(engine, name, prompt(40, ord(name)), 100, priority=1)
    for _ in range(10):
        engine.step()
    ask(engine, "later", prompt(40, 7), 5, priority=1)
    ask(engine, "urgent", prompt(400, 8), 5)
    outputs = run(engine)
    assert next(iter(outputs)) == "urgent"
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == {
        name: continuation(prompt(length, seed), -1, count, VOCABULARY)
        for name, length, seed, count in (
            ("a", 40, 97, 100),
            ("b", 40, 98, 100),
            ("later", 40, 7, 5),
            ("urgent", 400, 8, 5),
        )
    }
    assert engine.scheduler.stats().preemptions >= 1
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_deadline_ends_a_request_wherever_it_stands(overlap):
    engine = make_engine(
        pages=40, max_num_seqs=2, slots=1, adapters=1, overlap=overlap, asynchronous=True, delay=lambda number: 500
    )
    clock = engine.scheduler.clock
    ask(engine, "running", prompt(9), 200, timeout=5.0, stream=True)
    ask(engine, "in time", prompt(8), 20, timeout=5.0)
    ask(engine, "waiting", prompt(7), 20, timeout=5.0)
    ask(engine, "loading", prompt(6), 20, "adapter0", timeout=3.0)
    ask(engine, "patient", prompt(5), 20)
    outputs, deltas = {}, []
    while engine.has_work:
        clock.now += 0.1 if engine.runner.plans[-1:] else 0.0
        some, done = engine.step()
        deltas += some
        outputs |= {output.request_id: output.outputs[0] for output in done}
    reasons = {name: output.finish_reason for name, output in outputs.items()}
    assert reasons == {
        "running": "timeout",
        "in time": "length",
        "waiting": "length",
        "loading": "timeout",
        "patient": "length",
    }
    assert "deadline passed after 0 tokens" in outputs["loading"].stop_reason
    text = outputs["running"].token_ids
    assert 30 < len(text) < 60 and text == continuation(prompt(9), -1, len(text), VOCABULARY), "what it has is kept"
    assert deltas[-1].finish_reason == "timeout" and sum(len(delta.token_ids) for delta in deltas) == len(text)
    assert engine.scheduler.stats().timeouts == 2
    for _ in range(600):
        engine.take_loads_in()
    assert_idle(engine)


def test_deadlines_of_finished_requests_are_forgotten():
    engine = make_engine(pages=40)
    for index in range(1000):
        ask(engine, str(index), prompt(3), 1, timeout=3600.0)
        run(engine)
    assert len(engine.scheduler._deadlines) < 100


def test_a_replaced_adapter_serves_those_that_came_before():
    engine = make_engine(slots=2, adapters=1, asynchronous=True)
    ask(engine, "old", prompt(9), 30, "adapter0")
    ask(engine, "old, waiting", prompt(8), 30, "adapter0")
    for _ in range(8):
        engine.step()
    engine.scheduler.adapter_numbers["adapter0"] = 1
    engine.scheduler.forget_adapter(0)
    ask(engine, "new", prompt(9), 30, "adapter0")
    engine.step()
    assert engine.runner.forgotten == []
    assert tokens(run(engine)) == {
        "old": continuation(prompt(9), 0, 30, VOCABULARY),
        "old, waiting": continuation(prompt(8), 0, 30, VOCABULARY),
        "new": continuation(prompt(9), 1, 30, VOCABULARY),
    }
    engine.plan()
    assert engine.runner.forgotten == [0] and engine.scheduler.states.slots.resident.keys() == {1}
    assert_idle(engine)


def test_an_adapter_that_is_forgotten_while_it_is_on_its_way():
    engine = make_engine(slots=1, adapters=2, asynchronous=True, delay=lambda number: 9)
    ask(engine, "a", prompt(9), 3, "adapter0")
    engine.step()
    engine.abort("a")
    engine.scheduler.forget_adapter(0)
    engine.plan()
    assert engine.runner.forgotten == [], "its slot must not be another's before the copy has ended"
    ask(engine, "b", prompt(9), 3, "adapter1")
    assert tokens(run(engine))["b"] == continuation(prompt(9), 1, 3, VOCABULARY)
    assert engine.runner.forgotten == [0]
    assert_idle(engine)


def test_unknown_adapters_are_refused():
    engine = make_engine(slots=1, adapters=1)
    with pytest.raises(RequestError, match="'nobody' is not known"):
        ask(engine, "x", prompt(4), 2, "nobody")
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_many_adapters_over_few_slots(overlap):
    """Zipf traffic over 60 adapters and 4 slots, copies of random length, answers of random length, some requests
    aborted.
    """
    source = random.Random(5)
    engine = make_engine(
        pages=60,
        max_model_len=400,
        max_num_seqs=6,
        budget=80,
        slots=4,
        adapters=60,
        overlap=overlap,
        asynchronous=True,
        patience=25,
        delay=lambda number: source.randrange(1, 12),
    )
    beginning = prompt(130, 3)
    wanted, outputs = {}, {}
    for index in range(300):
        adapter = source.choices(range(-1, 60), weights=[1 / rank for rank in range(1, 62)])[0]
        ids = beginning[: source.choice((0, 64, 130))] + [
            source.randrange(VOCABULARY) for _ in range(source.randrange(1, 40))
        ]
        wanted[str(index)] = (ids, adapter, source.randrange(1, 40))
        ask(engine, str(index), ids, wanted[str(index)][2], None if adapter < 0 else f"adapter{adapter}")
        for _ in range(source.randrange(6)):
            outputs |= {output.request_id: output for output in engine.step()[1]}
        if index % 9 == 8 and str(index - 3) not in outputs:
            engine.abort(str(index - 3))
            del wanted[str(index - 3)]
    outputs |= run(engine, 100000)
    assert tokens(outputs) == {
        name: continuation(ids, adapter, count, VOCABULARY) for name, (ids, adapter, count) in wanted.items()
    }
    stats = engine.scheduler.stats()
    assert stats.adapter_loads == engine.runner.started and stats.adapter_evictions > 20 and stats.prefix_hits > 0
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)


def test_aborts_leave_nothing_behind():
    """A quick count; SIDESTREAM_ABORTS=100000 for the long one."""
    count = int(os.environ.get("SIDESTREAM_ABORTS", "2000"))
    source = random.Random(1)
    engine = make_engine(
        pages=30,
        max_model_len=300,
        max_num_seqs=8,
        budget=64,
        slots=2,
        adapters=5,
        overlap=True,
        asynchronous=True,
        delay=lambda number: source.randrange(1, 4),
    )
    open_requests: list[str] = []
    for index in range(count):
        adapter = source.randrange(-1, 5)
        engine.add(
            Request(
                str(index),
                None,
                prompt(source.randrange(1, 90), index % 3),
                greedy(200, n=source.randrange(1, 3)),
                None if adapter < 0 else f"adapter{adapter}",
                source.randrange(-1, 2),
            )
        )
        open_requests.append(str(index))
        if index % 3 == 0:
            engine.step()
        while len(open_requests) > 12:
            engine.abort(open_requests.pop(source.randrange(len(open_requests))))
    for name in open_requests:
        engine.abort(name)
    used = engine.scheduler.states.pages.num_used
    assert used == 0, "an abort frees its pages at once"
    run(engine)
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)
    assert sum(map(len, engine.scheduler.states.waiting._queues.values())) < 200


def test_a_failed_step_ends_what_depends_on_it_and_nothing_else():
    """Steps are planned one ahead; the failed one stores nothing, and the next one goes on from there.

    Beginnings are shared.
    """
    source = random.Random(3)
    failures = 0
    for _ in range(60):
        engine = make_engine(pages=40, max_model_len=450, max_num_seqs=4, budget=70, overlap=True)
        runner, scheduler = engine.runner, engine.scheduler
        prompts = {
            str(index): prompt(200, 1)[: source.choice((0, 100, 200))]
            + [source.randrange(VOCABULARY) for _ in range(30)]
            for index in range(6)
        }
        for name, ids in prompts.items():
            ask(engine, name, ids, 20)
        outputs, flying, bad = {}, [], source.randrange(12)
        while engine.has_work:
            plan = engine.plan()
            if plan is not None and plan.step == bad:
                runner.fail(plan)
                flying.append((plan.step, None))
            elif plan is not None:
                flying.append((plan.step, runner.submit(plan)))
            if flying and (plan is None or len(flying) > 1):
                step, result = flying.pop(0)
                if result is None:
                    scheduler.fail_step(step)
                    failures += 1
                else:
                    outputs |= {
                        output.request_id: output.outputs[0]
                        for output in engine.deliver(engine.commit(runner.collect(result)), result)[1]
                    }
            outputs |= {output.request_id: output.outputs[0] for output in engine.take_ended()[1]}
            if not flying and plan is None and not scheduler.has_work:
                break
        assert outputs.keys() == prompts.keys()
        for name, output in outputs.items():
            if output.finish_reason != "error":
                assert output.token_ids == continuation(prompts[name], -1, 20, VOCABULARY)
        for name, ids in prompts.items():
            ask(engine, f"again {name}", ids, 20)
        assert tokens(run(engine)) == {
            f"again {name}": continuation(ids, -1, 20, VOCABULARY) for name, ids in prompts.items()
        }
        assert_idle(engine)
    assert failures > 50
