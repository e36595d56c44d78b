"""An exact engine computes the tokens of prompts in prompt steps, and sampled ones in decode steps, for ever."""

import random
from collections import deque

import pytest
from sidestream.runtime.api.request import Continuation, Request
from sidestream.runtime.api.sampling_params import SamplingParams
from support.engines import VOCABULARY, Engine, ask, assert_idle, greedy, make_engine, random_prompt, run, tokens
from support.exact_runner import exact_continuation


def drive(engine: Engine, ahead: int, source: random.Random, failures: float) -> dict[str, list[int]]:
    """The answers, with up to `ahead` + 1 steps in flight, of which a share fails."""
    runner, flying, answers = engine.runner, deque(), {}
    for _ in range(20000):
        engine.take_loads_in()
        plan = engine.plan()
        if plan is not None:
            failing = source.random() < failures and all(result is not None for _, result in flying)
            flying.append((plan.step, runner.fail(plan) if failing else runner.submit(plan)))
        if flying and (plan is None or len(flying) > ahead):
            step, result = flying.popleft()
            if result is None:
                engine.scheduler.fail_step(step)
            else:
                done = engine.deliver(engine.commit(runner.collect(result)), result)[1]
                answers |= {output.request_id: output.outputs[0].token_ids for output in done}
        answers |= {output.request_id: output.outputs[0].token_ids for output in engine.take_ended()[1]}
        if not flying and plan is None and not engine.scheduler.has_work:
            return answers
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("seed", range(14))
def test_every_token_keeps_its_kind_of_step(seed: int) -> None:
    """Over chunks of 8 to 300 tokens, few pages and slots, cached prefixes, failed steps, and prompts that hold earlier
    answers, which are tokens of a prompt then.
    """
    source = random.Random(seed)
    slots, ahead, budget = source.randrange(3), source.randrange(2), source.choice((8, 64, 300))
    engine = make_engine(
        pages=source.choice((9, 14, 40)),
        max_model_len=450,
        max_num_seqs=source.randrange(1, 8),
        budget=budget,
        slots=slots,
        adapters=3 if slots else 0,
        overlap=ahead > 0,
        asynchronous=bool(slots),
        prefix_caching=source.random() < 0.8,
        patience=source.choice((4, 128)),
        exact=True,
    )
    beginning = random_prompt(source, 200)
    expected: dict[str, list[int]] = {}
    preemptions = 0
    for turn in range(3):
        for index in range(source.randrange(2, 9)):
            name, adapter = f"{turn}.{index}", source.randrange(-1, 3) if slots else -1
            ids = beginning[: source.choice((0, 63, 64, 128, 200))] + random_prompt(source, source.randrange(1, 40))
            if source.random() < 0.3:
                ids = beginning[:128]  # all of it may be cached
            count = source.randrange(1, 90)
            expected[name] = exact_continuation(ids, adapter, count, VOCABULARY)
            ask(engine, name, ids, count, None if adapter < 0 else f"adapter{adapter}")
        answers = drive(engine, ahead, source, 0.02 if seed % 3 == 0 else 0.0)
        for name, answer in answers.items():
            assert answer == expected[name][: len(answer)], name
            assert seed % 3 == 0 or answer == expected[name]
        preemptions += engine.scheduler.states.preemptions
        if not slots and answers:  # the next turn's prompts hold an answer, or end in the middle of one
            name = max(answers, key=lambda name: len(answers[name]))
            beginning = (beginning[:128] + answers[name] + beginning)[:200]
    assert_idle(engine)


def test_a_preempted_answer_is_computed_again_token_by_token() -> None:
    """And another request whose prompt holds the answer does not share its pages."""
    engine = make_engine(pages=40, budget=128, exact=True)
    ids = random_prompt(random.Random(3), 128)
    answer = exact_continuation(ids, -1, 150, VOCABULARY)
    ask(engine, "answered", ids, 150)
    while len(engine.scheduler.states.running) < 1 or engine.scheduler.states.running[0].length < 128 + 140:
        engine.step()
    later = exact_continuation(ids + answer[:64], -1, 5, VOCABULARY)
    ask(engine, "asked", ids + answer[:64] + [1], 1)  # its pages hold the same tokens, of the other kind
    engine.step()
    engine.step()
    (sequence,) = [each for each in engine.scheduler.states.running if each.request_id == "answered"]
    before = len(engine.runner.plans)
    engine.scheduler.preemption.preempt(sequence)
    assert tokens(run(engine))["answered"] == answer
    replayed = [plan for plan in engine.runner.plans[before:] if plan.decode and not len(plan.sample_rows)]
    assert len(replayed) >= 138 and all(plan.num_tokens == 1 for plan in replayed)
    ask(engine, "again", ids + answer[:64], 5)
    output = run(engine)["again"]
    assert output.outputs[0].token_ids == later and output.num_cached_tokens == 128


def test_pages_with_sampled_tokens_are_not_found() -> None:
    engine = make_engine(pages=40, budget=128, exact=True)
    ids = random_prompt(random.Random(4), 100)
    ask(engine, "first", ids, 100)
    answer = tokens(run(engine))["first"]
    ask(engine, "second", ids + answer, 20)
    output = run(engine)["second"]
    assert output.num_cached_tokens == 64
    assert output.outputs[0].token_ids == exact_continuation(ids + answer, -1, 20, VOCABULARY)


def test_a_continued_request_and_a_suspect_are_replayed() -> None:
    ids = random_prompt(random.Random(5), 70)
    answer = exact_continuation(ids, -1, 60, VOCABULARY)
    for alone in (False, True):
        engine = make_engine(budget=40, exact=True)
        request = Request("name", None, ids, greedy(60), continues=(Continuation(answer[:30]),))
        engine.add(request, True, alone)
        assert tokens(run(engine))["name"] == answer


def test_prompts_and_answers_take_turns() -> None:
    """A long prompt does not stop the answers of others, nor they it."""
    engine = make_engine(pages=60, budget=16, exact=True, max_model_len=640)
    ask(engine, "short", [1, 2, 3], 60)
    for _ in range(4):
        engine.step()
    ask(engine, "long", random_prompt(random.Random(6), 400), 1)
    before = len(engine.runner.plans)
    for _ in range(20):
        engine.step()
    kinds = [plan.decode for plan in engine.runner.plans[before:]]
    assert abs(kinds.count(True) - kinds.count(False)) <= 2
    run(engine)


def test_scored_answers_are_computed_in_decode_steps() -> None:
    """With the tokens that a conversation's user and tools have given in prompt steps."""
    engine = make_engine(budget=64, exact=True)
    source = random.Random(7)
    given, first, tool, second = (random_prompt(source, length) for length in (70, 20, 10, 15))
    ids = given + first + tool + second
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    request = Request("score", None, ids, params, scored=((70, 90), (100, 115)))
    engine.add(request)
    (output,) = run(engine).values()
    seen = [token + 1000 * (70 <= place < 90 or place >= 100) for place, token in enumerate(ids)]
    from support.fake_runner import next_token

    assert output.outputs[0].token_ids == [next_token(seen, -1, VOCABULARY)]
    kinds = [(plan.decode, plan.num_tokens) for plan in engine.runner.plans]
    assert [kind for kind in kinds if not kind[0]] == [(False, 64), (False, 6), (False, 10)]
    assert len(kinds) == 3 + 20 + 15
