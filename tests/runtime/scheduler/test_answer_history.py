"""Rings of former answers: whose they are, what of them counts, and who finds none."""

import random

import pytest
from sidestream.ops.spec_decode.draft_ngram import LONGEST
from sidestream.runtime.api.request import Request
from sidestream.runtime.scheduler.answer_history import PROMPT_END, AnswerHistory
from sidestream.runtime.scheduler.sequence import Sequence
from sidestream.runtime.scheduler.step_plan import RINGS
from support.engines import ask, greedy, make_engine, prompt, run, tokens


def sequence(number: int, prompt_length: int = 10, answer: int = 5, row: int = 0, **fields) -> Sequence:
    ids = list(range(prompt_length + answer))
    params = greedy(100, **fields)
    return Sequence(0, "r", 0, ids, prompt_length, 500, params, 0, frozenset(), frozenset(), number=number, row=row)


def rings(tokens: int = 100) -> AnswerHistory:
    return AnswerHistory(tokens, lambda number: "" if number < 0 else f"content {number % 1000}")


def test_an_answer_is_kept_with_the_end_of_its_prompt() -> None:
    kept = rings()
    ring = kept.acquire(sequence(3))
    for answer, prompt_length, first, place, filled in ((5, 10, 2, 0, 14), (7, 3, 0, 14, 25), (300, 20, 221, 0, 100)):
        if answer == 300:
            kept.ends[ring] = 0
            kept.mark_planned()
        kept.keep(sequence(3, prompt_length, answer, row=4), ring)
        assert kept.kept[-1].tolist() == [4, first, prompt_length + answer, ring, place]
        assert kept.filled[ring] == filled
    kept.keep(sequence(3, 10, 0), ring)
    assert len(kept.kept) == 1, "an answer without a token is none"


def test_a_plan_writes_no_place_twice_and_what_counts_was_written() -> None:
    source = random.Random(2)
    for _ in range(200):
        kept, written, newest = rings(source.randrange(1, 60)), {}, 0
        ring = kept.acquire(sequence(-1))
        for _plan in range(6):
            for _ in range(source.randrange(4)):
                newest += 1
                kept.keep(sequence(-1, source.randrange(1, 20), source.randrange(1, 40), row=newest), ring)
            places = [
                ((place + step) % kept.tokens, row)
                for row, first, end, _, place in kept.kept.tolist()
                for step in range(1 + end - first)
            ]
            assert len(dict(places)) == len(places)
            written |= dict(places)
            kept.mark_planned()
            counted = [
                written[(int(kept.ends[ring]) - step) % kept.tokens] for step in range(1, 1 + int(kept.filled[ring]))
            ]
            assert counted == sorted(counted, reverse=True) and (not newest or not counted or counted[0] == newest)


def test_one_content_has_one_ring_and_the_one_used_longest_ago_makes_room() -> None:
    kept = rings()
    mine = [kept.acquire(sequence(number)) for number in range(RINGS)]
    assert sorted(mine) == list(range(RINGS)) and kept.acquire(sequence(1003)) == mine[3]
    for ring in mine:
        kept.keep(sequence(0), ring)
    assert kept.acquire(sequence(999)) == -1, "all are in use"
    for ring in (mine[5], mine[3], mine[2]):
        kept.release(ring)
    assert kept.acquire(sequence(998)) == mine[2], "3 has another user"
    assert kept.filled[mine[2]] == 0 < kept.filled[mine[5]]
    assert not (kept.kept[:, 3] == mine[2]).any(), "what was to be kept of the former content is not"
    assert kept.acquire(sequence(997)) == mine[5]
    kept.release(-1)


def test_who_says_off_reads_nothing_and_leaves_nothing() -> None:
    assert rings().acquire(sequence(1, speculation="off")) == -1
    assert rings(0).acquire(sequence(1)) == -1


def test_removed_content_begins_again() -> None:
    kept = rings()
    ring = kept.acquire(sequence(3))
    for end in (lambda: kept.clear(3), lambda: kept.clear(3, forget=True), kept.clear_all):
        kept.keep(sequence(3), ring)
        assert kept.filled[ring] and len(kept.kept)
        end()
        assert not kept.filled[ring] and not len(kept.kept)
        assert kept.acquire(sequence(3)) == ring
    kept.clear(77)


@pytest.mark.parametrize("ahead", [0, 2])
def test_answers_of_the_same_content_are_looked_at(ahead: int) -> None:
    """Two names of one content share a ring; the base model, another content and what was removed do not."""
    engine = make_engine(
        pages=60, slots=3, adapters=3, speculation=3, hashes={0: "a", 1: "a", 2: "b"}, history=200, lag=2
    )
    engine._depth = ahead

    engine.runner.contents = {1: 0}

    def looked_up(name: str, adapter: str | None) -> bool:
        before = engine.runner.recalls
        ask(engine, name, prompt(9), 20, adapter)
        assert len(tokens(run(engine))[name]) == 20
        return engine.runner.recalls > before

    assert not looked_up("first", "adapter0")
    assert looked_up("second", "adapter0")
    assert looked_up("third", "adapter1")
    assert not looked_up("other", "adapter2")
    assert not looked_up("base", None)
    assert looked_up("base again", None)
    engine.scheduler.forget_adapter(0)
    assert not looked_up("removed", "adapter1")
    engine.add(Request("off", None, prompt(9), greedy(20, speculation="off"), "adapter2"))
    before = engine.scheduler.states.answers.filled.copy()
    run(engine)
    assert (engine.scheduler.states.answers.filled == before).all()
    assert looked_up("other again", "adapter2")


def test_the_prompts_end_is_as_long_as_what_is_compared() -> None:
    assert PROMPT_END == LONGEST
