"""speculation="auto" goes by what steps are seen to take, which on a fast GPU is the host's time."""

from collections.abc import Mapping

import pytest
from sidestream.compiler.cost.hardware import H200
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.api.request import Request
from sidestream.runtime.scheduler.speculation import (
    MAX_AGE,
    MIN_SAMPLES,
    AdapterAcceptance,
    DraftPlanner,
    Speculation,
    StepTimes,
)
from sidestream.tools.options.models import SHAPES
from sidestream.tools.options.sizing import SizedModel
from support.engines import Clock, greedy, make_engine, prompt, run

HOST_BOUND = ((1, 1, 0.20e-3), (1, 2, 0.21e-3), (1, 4, 0.22e-3), (1, 8, 0.25e-3))
SEEN_HOST_BOUND = {0: 0.54e-3, 1: 1.20e-3, 3: 1.22e-3, 7: 1.25e-3}
LARGE = ((1, 1, 2.35e-3), (1, 2, 2.45e-3), (1, 4, 2.55e-3), (1, 8, 2.70e-3))
SEEN_LARGE = {0: 2.39e-3, 1: 2.55e-3, 3: 2.65e-3, 7: 2.80e-3}
HELD = {1.0: [0], 1.7: [0, 1, 1, 0, 1, 0, 1, 1, 1, 1], 3.0: [2, 0, 4, 2, 1, 3], 3.34: [3, 0, 4, 2, 1, 4]}
"""Tokens a step with 7 drafts -> how many of the drafts hold, step by step."""


def simulate(
    measured: tuple[tuple[int, int, float], ...],
    takes: Mapping[int, float],
    made: float,
    requests: int,
    length: int,
    slow: int = 0,
) -> tuple[float, float]:
    """Requests one after the other: how many times the speed without drafts, and the share of the last half's steps
    that have drafts. So many steps take ten times as long at the beginning.
    """
    planner, first, held = DraftPlanner(measured), AdapterAcceptance(), HELD[made]
    now, steps, tokens, with_drafts = 0.0, 0, 0, list[bool]()
    for number in range(requests):
        speculation, left = Speculation(7, adaptive=True), length
        first.start(speculation, -1)
        while left > 0:
            room = min(7, left - 1)
            drafts = 0 if planner.skips(1, number) else planner.choose([(speculation, room)], 7, ahead=True)
            count = min(drafts, room)
            planner.times.plan(steps, 1, drafts)
            now += takes[drafts] * (10 if steps < slow else 1)
            planner.times.commit(steps, now)
            accepted = min(held[steps % len(held)], count)
            if count:
                speculation.add(count, accepted)
                first.add(-1, count, accepted)
            with_drafts.append(drafts > 0)
            steps, left, tokens = steps + 1, left - 1 - accepted, tokens + 1 + accepted
    late = with_drafts[len(with_drafts) // 2 :]
    return tokens * takes[0] / now, sum(late) / len(late)


@pytest.mark.parametrize(
    ("measured", "takes", "made", "pays"),
    [
        (HOST_BOUND, SEEN_HOST_BOUND, 1.7, False),
        (HOST_BOUND, SEEN_HOST_BOUND, 3.0, True),
        (HOST_BOUND, SEEN_HOST_BOUND, 1.0, False),
        (LARGE, SEEN_LARGE, 1.7, True),
        (LARGE, SEEN_LARGE, 3.34, True),
        (LARGE, SEEN_LARGE, 1.0, False),
    ],
)
def test_drafts_are_made_where_they_pay_as_seen(measured, takes, made, pays):
    speed, share = simulate(measured, takes, made, requests=2, length=2000)
    if pays:
        assert share > 0.9 and speed > 0.85 * made * takes[0] / takes[7]
    else:
        assert share < 0.05 and speed > 0.95


def test_first_steps_that_take_long_are_forgotten():
    """Else steps without drafts, once too slow, would never be seen again."""
    _, share = simulate(HOST_BOUND, SEEN_HOST_BOUND, 1.7, requests=2, length=3000, slow=6)
    assert share < 0.05


@pytest.mark.parametrize(("measured", "takes"), [(HOST_BOUND, SEEN_HOST_BOUND), (LARGE, SEEN_LARGE)])
@pytest.mark.parametrize("length", [6, 40])
def test_short_requests_pay_little_for_drafts_that_never_hold(measured, takes, length):
    speed, _ = simulate(measured, takes, 1.0, requests=1800 // length, length=length)
    assert speed > 0.95


@pytest.fixture(scope="module")
def routed() -> tuple[tuple[int, int, float], ...]:
    """Estimated steps of one sequence of Qwen3-30B-A3B on an H200. Each row of a step chooses experts of its own."""
    model = SizedModel(LlamaConfig.from_dict(SHAPES["qwen3-30b-a3b"]), None, CompileOptions())
    buckets = [Bucket(rows, 1, 17, 17, decode=rows == 1, lora=False, rows=rows) for rows in (1, 2, 4, 8)]
    return tuple((1, bucket.rows, model.seconds(bucket, 1024, 0, H200)) for bucket in buckets)


@pytest.mark.parametrize(("requests", "length"), [(2, 2000), (45, 40), (300, 6)])
def test_drafts_that_read_experts_of_their_own_cost_two_percent_at_most(routed, requests, length):
    """Also where none of them holds, as on random text; drafts that hold still pay."""
    takes = {rows - 1: seconds for _, rows, seconds in routed}
    assert takes[7] > 1.8 * takes[0], "the rows of a step are priced with the experts that they read"
    speeds = {made: simulate(routed, takes, made, requests, length)[0] for made in HELD}
    assert min(speeds.values()) > 0.98 and speeds[3.0] > 1.5


def see(times: StepTimes, first: int, sequences: int, drafts: int, seconds: float, count: int = MIN_SAMPLES + 1) -> int:
    """So many such steps, one after the other; returns the next one's number."""
    for step in range(first, first + count):
        times.plan(step, sequences, drafts)
        times.commit(step, step * seconds)
    return first + count


def test_a_step_takes_what_was_seen_and_at_least_its_program():
    times = StepTimes([(1, 1, 2.0), (1, 8, 3.0), (8, 1, 4.0), (8, 8, 6.0)])
    assert times.expected(1) == {0: 2.0, 7: 3.0}
    step = see(times, 0, 1, 7, 5.0)
    assert times.expected(1) == {0: 2.0, 7: 5.0}, "steps with drafts say nothing of one without"
    assert times.expected(8) == {0: 4.0, 7: 8.0}, "at another size they take as much more"
    step = see(times, step, 1, 0, 2.5)
    assert times.expected(1) == {0: 2.5, 7: 5.0} and times.expected(5) == {0: 4.5, 7: 8.0}
    see(times, step, 8, 0, 1.0)
    assert times.expected(8)[0] == 4.0
    assert times.is_measured(7, 0) and not times.is_measured(7, 7)


def test_only_steps_in_line_are_seen():
    times = StepTimes([(1, 1, 2.0), (1, 2, 2.0)])
    for step in range(40):  # another kind each time
        times.plan(step, 1, step % 2)
        times.commit(step, 9.0 * step)
    for step in range(40, 80):  # every second one after a pause, or with a part of a prompt
        if step % 2:
            times.plan(step, 1, 0)
        times.commit(step, 9.0 * step)
    for step in range(80, 100):  # every second one fails
        times.plan(step, 1, 0)
        if step % 2:
            times.fail(step)
        else:
            times.commit(step, 9.0 * step)
    assert times.expected(1) == {0: 2.0, 1: 2.0} and not times.is_measured(1, 0)


def test_a_slow_step_now_and_then_changes_nothing_and_old_ones_are_forgotten():
    times = StepTimes([(1, 1, 2.0), (1, 2, 2.0)])
    now = 0.0
    for step in range(100):
        times.plan(step, 1, 0)
        now += 50.0 if step % 5 == 0 else 3.0
        times.commit(step, now)
    assert times.expected(1)[0] == pytest.approx(3.0)
    see(times, 200, 1, 1, 4.0)
    assert times.expected(1)[1] == pytest.approx(4.0)
    see(times, 210, 1, 1, 4.0, MAX_AGE)
    assert not times.is_measured(1, 0) and times.is_measured(1, 1)


@pytest.mark.parametrize(("right", "takes", "drafts"), [(0.4, 4.0, False), (1.0, 4.0, True), (0.4, 1.0, True)])
def test_an_engine_sees_what_its_steps_take(right, takes, drafts):
    """`takes`: a step with drafts, in steps without; programs alone take the same."""
    clock, same = Clock(), tuple((1, rows, 1.0) for rows in (1, 2, 4, 8))
    engine = make_engine(
        pages=60, speculation="auto", right=right, step_times=same, overlap=True, clock=clock, max_num_seqs=1
    )
    plans, submit, collect = {}, engine.runner.submit, engine.runner.collect

    def submitted(plan):
        plans[plan.step] = plan
        return submit(plan)

    def collected(handle):
        result = collect(handle)
        clock.now += takes if plans[result.step].verifies else 1.0
        return result

    engine.runner.submit, engine.runner.collect = submitted, collected
    for index in range(3):
        engine.add(Request(str(index), None, prompt(9), greedy(500)))
    run(engine)
    late = [plan.verifies for plan in list(plans.values())[len(plans) // 2 :]]
    assert (sum(late) / len(late) > 0.5) == drafts
