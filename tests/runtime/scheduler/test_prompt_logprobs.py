"""Log-probabilities of prompts: each token is scored once, in order, whatever happens to the prompt's chunks."""

import random

import numpy as np
import pytest
from sidestream.runtime.api.outputs import RequestOutput
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.step_plan import SCORED_ROWS
from support.engines import VOCABULARY, Engine, assert_idle, greedy, make_engine, random_prompt
from support.fake_runner import continuation, next_token

Scores = dict[str, list[tuple[int, float, int, int]]]


def drive(engine: Engine, ahead: int, failing: set[int]) -> tuple[dict[str, RequestOutput], Scores]:
    """To the end, with `ahead` steps in flight; the steps `failing` fail. The outputs, and of each prompt's scored
    tokens (token, log-probability, rank, how many are reported).
    """
    runner, flying = engine.runner, []
    outputs: dict[str, RequestOutput] = {}
    scores: Scores = {}
    for _ in range(5000):
        plan = engine.plan()
        if plan is not None:
            assert len(plan.logits_indices) <= plan.num_sequences + SCORED_ROWS
            assert len(plan.logits_indices) <= engine.scheduler.limits.max_num_batched_tokens
            flying.append((plan.step, runner.fail(plan) if plan.step in failing else runner.submit(plan)))
        if flying and (plan is None or len(flying) > ahead):
            step, result = flying.pop(0)
            if result is None:
                engine.scheduler.fail_step(step)
                continue
            deltas, finished = engine.deliver(engine.commit(runner.collect(result)), result)
            for delta in deltas:
                assert delta.prompt_logprobs is not None and not delta.token_ids and delta.request_id not in outputs
                for entry in delta.prompt_logprobs:
                    token, first = next(iter(entry.items()))
                    scores.setdefault(delta.request_id, []).append((token, first.logprob, first.rank, len(entry)))
            outputs |= {output.request_id: output for output in finished}
        outputs |= {output.request_id: output for output in engine.take_ended()[1]}
        if not flying and plan is None and not engine.scheduler.has_work:
            return outputs, scores
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("seed", range(15))
def test_every_token_of_a_prompt_is_scored_once(seed):
    source = random.Random(seed)
    ahead = source.randrange(2)
    seats = source.choice((1, 2, 5, 12))
    engine = make_engine(
        pages=source.choice((12, 40)),
        max_model_len=450,
        max_num_seqs=seats,
        budget=max(seats, source.choice((1, 16, 70, 400))),
        overlap=bool(ahead),
    )
    beginning = random_prompt(source, 130)
    asked: dict[str, tuple[list[int], int | None, list[int]]] = {}
    for index in range(source.randrange(2, 9)):
        ids = (beginning if source.random() < 0.6 else []) + random_prompt(source, source.randrange(1, 180))
        count, choices = source.choice((None, 0, 2, 5)), source.choice((1, 1, 3))
        ends = sorted(source.sample(range(1, len(ids) + 1), 2 * source.randrange(min(4, len(ids)) // 2 + 1)))
        scored = tuple(zip(ends[::2], ends[1::2], strict=True)) if count is not None else ()
        places = [place for begin, end in scored or [(1, len(ids))] for place in range(begin, end)]
        asked[str(index)] = ids, count, places
        params = SamplingParams(temperature=0, max_tokens=source.randrange(1, 40), n=choices, prompt_logprobs=count)
        engine.add(Request(str(index), None, ids, params, owner=str(index % 2), scored=scored))
    failing = set(source.sample(range(3, 40), source.choice((0, 0, 3))))
    outputs, scores = drive(engine, ahead, failing)
    assert set(outputs) == set(asked)
    assert_idle(engine)
    for name, (ids, count, places) in asked.items():
        answers = outputs[name].outputs
        if any(answer.finish_reason == "error" for answer in answers):
            assert failing
            continue
        for answer in answers:
            assert answer.token_ids == continuation(ids, -1, len(answer.token_ids), VOCABULARY)
        if count is None:
            assert name not in scores
            continue
        found = scores.get(name, [])
        said = [next_token(ids[:place], -1, VOCABULARY) for place in places]
        assert [(token, logprob, rank) for token, logprob, rank, _ in found] == [
            (ids[place], -1.0 - guess, guess) for place, guess in zip(places, said, strict=True)
        ]
        assert all(reported in (count, count + 1) for *_, reported in found)


def test_a_long_prompt_leaves_room_for_others():
    """It takes at most SCORED_ROWS rows of logits of a step; the others' tokens go on."""
    engine = make_engine(pages=60, max_model_len=640, budget=400)
    engine.add(Request("long", None, list(range(90)) * 6, greedy(1, prompt_logprobs=0)))
    engine.add(Request("short", None, [1, 2, 3], greedy(5)))
    outputs, scores = drive(engine, 0, set())
    assert len(scores["long"]) == 539 and len(outputs["short"].outputs[0].token_ids) == 5
    chunks = [int(np.diff(plan.query_start).max()) for plan in engine.runner.plans if len(plan.scored_rows)]
    assert chunks == [SCORED_ROWS + 1] * 4 + [24]


def test_what_is_cached_is_computed_again_and_then_shared():
    engine = make_engine(pages=40, budget=200)
    ids = [7] * 150
    for name, fields, cached in (
        ("first", {}, 0),
        ("second", {"prompt_logprobs": 1}, 0),
        ("third", {}, 128),
    ):
        engine.add(Request(name, None, ids, greedy(3, **fields)))
        outputs, scores = drive(engine, 0, set())
        assert outputs[name].num_cached_tokens == cached
        assert len(scores.get(name, ())) == (149 if fields else 0)


@pytest.mark.parametrize(("first", "cached"), [(1, 0), (64, 0), (65, 64), (129, 128), (149, 128)])
def test_tokens_before_the_first_scored_one_may_come_from_the_cache(first, cached):
    """The logits that score a token are those of the token before it, which is computed."""
    engine, ids = make_engine(pages=40, budget=200), [7] * 150
    engine.add(Request("first", None, ids, greedy(1)))
    drive(engine, 0, set())
    engine.add(Request("second", None, ids, greedy(1, prompt_logprobs=0), scored=((first, 150),)))
    outputs, scores = drive(engine, 0, set())
    assert outputs["second"].num_cached_tokens == cached and len(scores["second"]) == 150 - first
    assert sum(len(plan.scored_rows) for plan in engine.runner.plans) == 150 - first
