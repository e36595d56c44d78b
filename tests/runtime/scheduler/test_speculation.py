"""speculation="auto": one number of drafts a step, from step times and acceptances."""

import pytest
from sidestream.runtime.api.request import Request
from sidestream.runtime.scheduler.speculation import (
    MIN_SPEEDUP,
    RETRY_AFTER,
    DraftPlanner,
    Speculation,
    StepTimes,
    drafts_without_times,
    expected_accepted,
    fastest_drafts,
)
from support.engines import VOCABULARY, ask, greedy, make_engine, prompt, run, tokens
from support.fake_runner import continuation

FLAT = {0: 1.0, 1: 1.01, 3: 1.03, 7: 1.1}
STEEP = {0: 1.0, 1: 1.4, 3: 2.2, 7: 4.0}


def times(**by_drafts: float) -> tuple[tuple[int, int, float], ...]:
    """The same at 1, 4 and 32 sequences: `none`, `one`, `three`, `seven` drafts."""
    rows = {"none": 1, "one": 2, "three": 4, "seven": 8}
    return tuple((size, rows[name], took) for name, took in by_drafts.items() for size in (1, 4, 32))


def with_acceptance(rate: float, steps: int = 200) -> Speculation:
    """One whose drafts have held so often, one draft a step."""
    speculation, held = Speculation(7, adaptive=True), 0.0
    for _ in range(steps):
        held += rate
        speculation.add(1, int(held))
        held -= int(held)
    return speculation


def test_what_is_expected_of_a_chain():
    assert [expected_accepted(0.0, drafts) for drafts in (0, 1, 7)] == [0, 0, 0]
    assert [expected_accepted(1.0, drafts) for drafts in (0, 1, 7)] == [0, 1, 7]
    assert expected_accepted(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)


@pytest.mark.parametrize(
    ("seconds", "acceptance", "drafts"),
    [
        (FLAT, 1.0, 7),
        (FLAT, 0.9, 7),
        (FLAT, 0.3, 3),
        (FLAT, 0.0, 0),
        (STEEP, 1.0, 7),
        (STEEP, 0.9, 3),
        (STEEP, 0.5, 1),
        (STEEP, 0.3, 0),
        ({0: 1.0}, 1.0, 0),
        ({0: 1.0, 1: 1.9}, 1.0, 1),
        ({0: 1.0, 1: 2 / MIN_SPEEDUP + 0.001}, 1.0, 0),
    ],
)
@pytest.mark.parametrize("sequences", [1, 24])
def test_the_drafts_that_make_the_most_tokens_per_second(seconds, acceptance, drafts, sequences):
    assert fastest_drafts(seconds, sequences, [(acceptance, 7)] * sequences) == drafts


def test_the_choice_is_the_best_of_all():
    """Against the plain enumeration, at many acceptances and prices."""
    for price in range(1, 40):
        seconds = {0: 1.0, 1: 1 + price / 60, 3: 1 + price / 25, 7: 1 + price / 10}
        for tenths in range(11):
            adaptive = [(tenths / 10, 7), (tenths / 20, 3), (0.1, 7)]
            speed = {
                drafts: (5 + sum(expected_accepted(chance, min(drafts, room)) for chance, room in adaptive))
                / seconds[drafts]
                for drafts in seconds
            }
            best = max(speed, key=lambda drafts: (speed[drafts], -drafts))
            wanted = best if speed[best] > MIN_SPEEDUP * speed[0] else 0
            assert fastest_drafts(seconds, 5, adaptive) == wanted


def test_one_that_accepts_much_does_not_make_a_whole_batch_pay():
    alone, others = (0.97, 7), [(0.02, 7)] * 31
    seconds = {0: 1.0, 1: 1.05, 3: 1.2, 7: 1.5}
    assert fastest_drafts(seconds, 1, [alone]) == 7
    assert fastest_drafts(seconds, 32, [alone, *others]) == 0
    assert fastest_drafts(seconds, 32, [alone]) == 0, "nor where the others have no drafts at all"
    assert fastest_drafts(FLAT, 32, [alone, *others]) == 7, "where it costs less than it brings, it may"
    assert drafts_without_times(1, [alone], 7) == 7 and drafts_without_times(32, [alone, *others], 7) == 0


def test_rows_that_another_sequence_has_asked_for_are_no_price():
    assert fastest_drafts(STEEP, 2.0, [(0.3, 7)]) == 0
    assert fastest_drafts(STEEP, 2.0, [(0.3, 7)], fixed=2) == 3
    assert fastest_drafts(STEEP, 2.0, [(0.3, 7)], fixed=7) == 7


def test_without_times_a_table_decides():
    chosen = {rate: drafts_without_times(1, [(rate, 7)], 7) for rate in (0.0, 0.2, 0.3, 0.5, 0.7, 0.8, 1.0)}
    assert chosen == {0.0: 0, 0.2: 0, 0.3: 1, 0.5: 3, 0.7: 3, 0.8: 7, 1.0: 7}
    assert drafts_without_times(1, [(1.0, 7)], 3) == 3 and drafts_without_times(2, [(0.4, 7)], 7) == 0


def test_times_are_those_of_the_program_that_a_batch_runs_in():
    known = StepTimes([(8, 1, 3.0), (1, 1, 2.0), (1, 2, 2.5), (8, 2, 3.5), (1, 8, 2.75)])
    assert known.expected(1) == {0: 2.0, 1: 2.5, 7: 2.75}
    assert known.expected(2) == known.expected(8) == {0: 3.0, 1: 3.5}
    assert known.expected(9) == {} == StepTimes([(1, 2, 2.5)]).expected(1)


def test_acceptance_is_that_of_the_drafts_that_were_tried():
    assert with_acceptance(0.75).acceptance == pytest.approx(0.75, abs=0.12)
    chain = Speculation(7, adaptive=True)
    for _ in range(100):
        chain.add(7, 3)  # three of the four that were tried
    assert chain.acceptance == pytest.approx(0.75, abs=0.01) and (chain.counts.drafted, chain.counts.accepted) == (
        700,
        300,
    )


@pytest.mark.parametrize("measured", [(), times(none=1.0, one=1.1, three=1.3, seven=1.8)])
def test_few_accepted_drafts_end_it_until_it_is_tried_again(measured):
    speculation, planner = Speculation(7, adaptive=True), DraftPlanner(measured)

    def step(right: bool) -> int:
        drafts = planner.choose([(speculation, 7)], 7)
        if drafts:
            speculation.add(drafts, drafts if right else 0)
        return drafts

    counts = [step(right=False) for _ in range(40 + 4 * RETRY_AFTER)]
    assert counts[0] > 1 and counts[30:40] == [0] * 10
    assert 1 <= sum(count > 0 for count in counts[40:]) <= 8 and max(counts[40:]) == 1
    later = [step(right=True) for _ in range(RETRY_AFTER + 10)]
    assert later[-1] == 7, "what it finds out by trying counts"


def test_an_engine_goes_by_the_times_it_is_told():
    drafts = {}
    for name, measured in {
        "cheap": times(none=1.0, one=1.0, three=1.0, seven=1.0),
        "dear": times(none=1.0, one=9.0, three=9.0, seven=9.0),
        "one": times(none=1.0, one=1.1, three=9.0, seven=9.0),
    }.items():
        engine = make_engine(pages=60, speculation="auto", right=1.0, step_times=measured)
        for index in range(4):
            ask(engine, str(index), prompt(9, index), 60)
        outputs = run(engine)
        assert tokens(outputs) == {str(index): continuation(prompt(9, index), -1, 60, VOCABULARY) for index in range(4)}
        drafts[name] = max(int(plan.drafts.max()) for plan in engine.runner.plans)
    assert drafts == {"cheap": 7, "dear": 0, "one": 1}


def test_a_number_of_drafts_is_kept_whatever_it_costs():
    engine = make_engine(
        pages=60, speculation="auto", right=1.0, step_times=times(none=1.0, one=9.0, three=9.0, seven=20.0)
    )
    engine.add(Request("explicit", None, prompt(9), greedy(40, speculation=3)))
    ask(engine, "auto", prompt(7, 1), 40)
    outputs = run(engine)
    verified = [plan.drafts.tolist() for plan in engine.runner.plans if plan.verifies]
    assert verified and all(max(counts) <= 3 for counts in verified)
    assert outputs["explicit"].num_draft_tokens > 0
    assert outputs["auto"].num_accepted_tokens > 0, "rows of a step that has them anyway cost it nothing"
