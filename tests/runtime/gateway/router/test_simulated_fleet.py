"""The simulated fleet: its engines keep their books, and the real router does better in front of it than chance."""

import random

import pytest
from support.simulated_fleet import Arrival, Engine, RoundRobin, Routed, Sizes, StepTimes, TwoChoices, simulate

TIMES = StepTimes()
PROMPT, TOKENS = 512, 128


def arrivals_of(count: int, rate: float, adapters: int, exponent: float, source: random.Random) -> list[Arrival]:
    """Poisson arrivals, `rate` per second; adapter k is drawn in proportion to k ** -exponent."""
    weights = [(rank + 1) ** -exponent for rank in range(adapters)]
    now, found = 0.0, []
    for adapter in source.choices(range(adapters), weights, k=count):
        now += source.expovariate(rate)
        prompt, tokens = (source.randint(mean // 2, mean * 3 // 2) for mean in (PROMPT, TOKENS))
        found.append(Arrival(now, adapter, prompt, tokens))
    return found


def rate_of(sizes: Sizes, load: float) -> float:
    """Requests per second for this share of the highest rate of an engine, with all its slots in use."""
    step = TIMES.step(sizes.capacity, min(sizes.capacity, sizes.slots)) / sizes.capacity
    return load / (PROMPT * TIMES.prompt + TOKENS * step)


def finish(engine):
    """Run an engine to its end; return its requests and their times of completion."""
    ended = []
    while (now := engine.step_end) is not None:
        ended += [(served, now) for served in engine.end_step()]
    return ended


def test_one_request_takes_what_its_parts_take():
    engine = Engine(Sizes(load_seconds=0.5), TIMES)
    served = engine.add(Arrival(1.0, 7, 100, 50))
    ((ended, at),) = finish(engine)
    assert ended is served and not served.held and served.first == pytest.approx(0.5 + 100e-5)
    assert at == pytest.approx(1.0 + 0.5 + 100e-5 + 49 * 0.00202) and engine.open == 0


def test_prompts_share_steps_and_are_computed_one_after_another():
    engine = Engine(Sizes(step_tokens=150, load_seconds=0.0), TIMES)
    first, second = (engine.add(Arrival(0.0, 1, 100, 2)) for _ in range(2))
    finish(engine)
    assert first.first == pytest.approx(100e-5), "the first step has begun before the second request"
    assert second.first == pytest.approx(200e-5 + TIMES.step(1, 1)), "its step has a token of the first one too"
    engine = Engine(Sizes(step_tokens=150, load_seconds=0.0), TIMES)
    engine.add(Arrival(0.0, 1, 10, 1))
    chunked = [engine.add(Arrival(0.0, 1, 100, 1)) for _ in range(2)]
    finish(engine)
    assert [each.first for each in chunked] == pytest.approx([160e-5, 210e-5]), "the second prompt is cut at 150 tokens"


def test_the_highest_rate_is_that_of_a_full_engine():
    sizes = Sizes(capacity=32, load_seconds=0.0)
    count, rate = 3000, rate_of(sizes, 1.0)
    arrivals = arrivals_of(count, 2 * rate, 32, 0.0, random.Random(2))
    engine, ends = Engine(sizes, TIMES), []
    for arrival in arrivals:
        while engine.step_end is not None and engine.step_end <= arrival.at:
            ends += [engine.step_end] * len(engine.end_step())
        engine.add(arrival)
    ends += [at for _, at in finish(engine)]
    assert len(ends) == count and rate * ends[-1] == pytest.approx(count, rel=0.05), "twice the load, the same rate"


def test_requests_wait_for_slots_and_for_room():
    engine = Engine(Sizes(capacity=2, slots=1, load_seconds=0.0), TIMES)
    requests = [engine.add(Arrival(0.0, adapter, 1, 10)) for adapter in (1, 2, 1, 1)]
    first, other, same, late = requests
    assert [each.held for each in requests] == [False, False, True, True] and engine.open == 4
    assert [served for served, _ in finish(engine)] == [first, same, late, other], "a resident adapter passes"
    assert 0 < first.first < same.first < late.first < other.first and engine.open == 0 and list(engine.slots) == [2]


def test_the_router_finds_adapters_more_often_and_answers_sooner():
    sizes, count = Sizes(capacity=32, slots=16, load_seconds=0.05), 8
    rate = count * rate_of(sizes, 0.5)
    arrivals = arrivals_of(4000, rate, 200, 1.0, random.Random(1))
    assert arrivals[-1].at == pytest.approx(4000 / rate, rel=0.1)
    found = {}
    for name, policy in {
        "router": Routed(count, sizes, 0),
        "two": TwoChoices(count, 0),
        "round": RoundRobin(count),
    }.items():
        engines = [Engine(sizes, TIMES) for _ in range(count)]
        served = simulate(arrivals, engines, policy)
        assert len(served) == 4000 and all(each.first > 0 for each in served)
        first = sorted(each.first for each in served)
        found[name] = sum(each.held for each in served) / 4000, first[3960]
    assert found["router"][0] > found["two"][0] + 0.2 and found["router"][0] > found["round"][0] + 0.2
    assert found["router"][1] < found["two"][1]
