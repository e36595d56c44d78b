"""Steps with drafts, planned ahead of what the device accepts: the tokens are those of steps of one token, at every
rate of acceptance, and nothing is lost or leaked on the way.
"""

import os
import random

import pytest
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.speculation import make_speculation
from sidestream.runtime.scheduler.step_plan import VERIFIED_ROWS, drafts_within
from support.engines import VOCABULARY, Clock, ask, assert_idle, greedy, make_engine, prompt, random_prompt, run, tokens
from support.fake_runner import continuation

ROUNDS = int(os.environ.get("SIDESTREAM_FUZZ", "40"))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_everything_at_once(seed):
    source = random.Random(seed)
    clock, adapters, asynchronous = Clock(), source.randrange(1, 6), source.random() < 0.5
    engine = make_engine(
        source.randrange(8, 40),
        450,
        source.randrange(1, 7),
        source.choice([8, 40, 200]),
        source.randrange(1, 5),
        adapters,
        asynchronous=asynchronous,
        patience=source.choice([1, 9, 30]),
        clock=clock,
        speculation=source.choice([1, 3, 7, 5, "auto"]),
        lag=2,
        right=source.choice([0.0, 0.5, 0.9, 1.0]),
        history=source.choice([0, 15, 90, 400]),
        seed=seed,
    )
    engine._depth = source.randrange(3)
    failing = source.random() < 0.3
    beginnings = [random_prompt(source, 260) for _ in range(2)]
    wanted, outputs, flying, steps = {}, {}, [], 0
    count = source.randrange(5, 25)
    while len(wanted) < count or engine.has_work or flying:
        if len(wanted) < count and source.random() < 0.4:
            ids = source.choice(beginnings)[: source.choice((0, 70, 130, 200))]
            ids = ids + random_prompt(source, source.randrange(1, 60))
            name, adapter, length = str(len(wanted)), source.randrange(-1, adapters), source.randrange(1, 90)
            params = greedy(length, speculation=source.choice((None, None, "off", 2, "auto")))
            priority, timeout = source.choice((0, 0, 0, -1, 2)), source.choice((None, None, None, source.random() * 30))
            adapter_name = None if adapter < 0 else f"adapter{adapter}"
            engine.add(Request(name, None, ids, params, adapter_name, priority=priority, timeout=timeout))
            wanted[name] = continuation(ids, adapter, length, VOCABULARY)
        engine.take_loads_in()
        plan = engine.plan()
        if plan is not None:
            bad = failing and source.random() < 0.02
            flying.append((plan.step, engine.runner.fail(plan) if bad else engine.runner.submit(plan)))
        ended = engine.take_ended()[1]
        if flying and (plan is None or len(flying) > engine._depth):
            step, result = flying.pop(0)
            if result is None:
                engine.scheduler.fail_step(step)
            else:
                ended += engine.deliver(engine.commit(engine.runner.collect(result)), result)[1]
        outputs |= {output.request_id: output.outputs[0] for output in ended}
        clock.now += 0.1
        if wanted and source.random() < 0.02:
            name = source.choice(list(wanted))
            engine.abort(name)
            outputs.setdefault(name, None)
        steps += 1
        assert steps < 30000, "it does not come to an end"
    assert outputs.keys() == wanted.keys()
    for name, output in outputs.items():
        if output is not None:
            cut = output.finish_reason in ("timeout", "error") and (failing or output.finish_reason == "timeout")
            assert output.token_ids == (wanted[name][: len(output.token_ids)] if cut else wanted[name])
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_is_accepted_is_counted_and_saves_steps(ahead):
    for drafts, right, most_steps in ((3, 1.0, 30), (7, 0.6, 55), (1, 0.0, 79)):
        engine = make_engine(pages=60, speculation=drafts, right=right, lag=2)
        engine._depth = ahead
        for index in range(4):
            ask(engine, str(index), prompt(9, index), 80)
        outputs = run(engine)
        for index in range(4):
            assert tokens(outputs)[str(index)] == continuation(prompt(9, index), -1, 80, VOCABULARY)
        stats, runner = engine.scheduler.stats(), engine.runner
        drafted = [output.num_draft_tokens for output in outputs.values()]
        accepted = [output.num_accepted_tokens for output in outputs.values()]
        assert (stats.drafted, stats.accepted) == (sum(drafted), sum(accepted))
        # what was in flight when a sequence ended is not counted
        assert 0 < stats.drafted <= runner.drafted and stats.accepted <= runner.accepted
        assert (stats.accepted == stats.drafted) == (right == 1.0) and (stats.accepted == 0) == (right == 0.0)
        assert sum(not plan.start_rows.size for plan in runner.plans) <= most_steps + ahead


def test_a_request_may_say_how_much_and_no_more_than_the_engine():
    engine = make_engine(pages=60, speculation=3, right=1.0)
    asked = {"off": 0, "auto": 3, 1: 1, 7: 3, None: 3}
    for option, most in asked.items():
        engine.add(Request(str(option), None, prompt(9), greedy(60, speculation=option)))
        before = len(engine.runner.plans)
        outputs = run(engine)
        seen = {max(0, int(plan.drafts.max())) for plan in engine.runner.plans[before:]}
        assert outputs[str(option)].num_draft_tokens == outputs[str(option)].num_accepted_tokens
        assert bool(outputs[str(option)].num_draft_tokens) == (most > 0) and max(seen) == most
    off = make_engine()
    with pytest.raises(RequestError, match="started with speculation"):
        off.add(Request("x", None, prompt(9), greedy(5, speculation=3)))
    off.add(Request("y", None, prompt(9), greedy(5, speculation="off")))


def test_where_tokens_depend_on_more_than_those_before_there_are_no_drafts():
    fields = {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 4}, {"allowed_token_ids": [1, 2]}
    for field in fields:
        engine = make_engine(pages=60, speculation=3, right=1.0)
        engine.add(Request("edited", None, prompt(9), SamplingParams(max_tokens=20, **field)))
        ask(engine, "plain", prompt(7, 1), 20)
        outputs = run(engine)
        assert outputs["edited"].num_draft_tokens == 0 < outputs["plain"].num_accepted_tokens
        assert tokens(outputs)["edited"] == continuation(prompt(9), -1, 20, VOCABULARY)
        for plan in (plan for plan in engine.runner.plans if plan.verifies):
            # edits name rows of the logits, which a step with drafts has for every token
            owners = plan.query_start.searchsorted(plan.sampling.bias_rows, side="right") - 1
            assert (plan.drafts[owners] == 0).all()


def test_a_step_has_no_more_rows_than_pay():
    assert [drafts_within(batch, 8192) for batch in (1, 32, 33, 64, 65, 128, 129)] == [7, 7, 3, 3, 1, 1, 0]
    assert [drafts_within(batch, 40) for batch in (1, 5, 6, 10, 11, 20, 21)] == [7, 7, 3, 3, 1, 1, 0]
    engine = make_engine(pages=200, max_num_seqs=60, budget=4096, speculation=7, right=1.0)
    for index in range(60):
        ask(engine, str(index), prompt(5, index), 30)
    run(engine)
    sizes = {(plan.num_sequences, int(plan.drafts.max())) for plan in engine.runner.plans if plan.verifies}
    assert (60, 3) in sizes and all(batch * (1 + drafts) <= VERIFIED_ROWS for batch, drafts in sizes)


def test_what_an_option_gives():
    assert (make_speculation(2, 7).max_drafts, make_speculation(2, 7).adaptive) == (2, False)
    assert (make_speculation("auto", 3).max_drafts, make_speculation("auto", 3).adaptive) == (3, True)
    assert make_speculation("off", 7) is None and make_speculation(5, 0) is None
