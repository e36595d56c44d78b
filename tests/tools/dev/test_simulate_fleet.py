"""The simulated fleet: its engines keep their books, and the real router does better in front of it than chance."""

import random

import pytest
from sidestream.tools.dev.simulate_fleet.__main__ import arrivals_of, main, rate_of
from sidestream.tools.dev.simulate_fleet.engines import Arrival, Engine, Sizes, simulate
from sidestream.tools.dev.simulate_fleet.policies import RoundRobin, Routed, TwoChoices
from sidestream.tools.dev.simulate_fleet.steps import ADAPTERS, SEQUENCES, StepTimes

TIMES = StepTimes(tuple(tuple(0.002 + 1e-5 * (count + each) for each in ADAPTERS) for count in SEQUENCES), 1e-5)


def test_times_between_estimates_are_linear():
    assert TIMES.step(1, 1) == pytest.approx(0.00202) and TIMES.step(40, 1) == pytest.approx(0.00241)
    assert TIMES.step(9999, 9999) == pytest.approx(0.002 + 1e-5 * (256 + 32))
    assert TIMES.step(100, 20) == pytest.approx(0.0032)


def test_one_request_takes_what_its_parts_take():
    engine = Engine(Sizes(load_seconds=0.5), TIMES)
    (served,) = simulate([Arrival(1.0, 7, 100, 50)], [engine], RoundRobin(1))
    assert not served.held and served.first == pytest.approx(0.5 + 100e-5 + 0.00202)
    assert engine.next_end() == pytest.approx(1.0 + 0.5 + 100e-5 + 50 * 0.00202)
    assert engine.end_one(engine.next_end()) is served and engine.open == 0 and engine.next_end() is None


def test_requests_wait_for_slots_and_for_room():
    engine = Engine(Sizes(capacity=2, slots=1, load_seconds=0.0), TIMES)
    first, other, same, late = (engine.add(Arrival(0.0, adapter, 0, 10)) for adapter in (1, 2, 1, 1))
    assert first.first > 0 and same.first > 0 and same.held, "what finds its adapter there passes what waits for a slot"
    assert other.first == late.first == 0.0 and engine.open == 4
    assert engine.end_one(engine.next_end()) is first
    assert late.first > 0 and other.first == 0.0, "there is room for one that runs"
    while engine.next_end() is not None:
        engine.end_one(engine.next_end())
    assert other.first > 0 and engine.open == 0 and list(engine.slots) == [2]


def test_the_router_finds_adapters_more_often_and_answers_sooner():
    sizes, count = Sizes(capacity=32, slots=16, load_seconds=0.05), 8
    rate = count * rate_of(TIMES, sizes, 0.5)
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
        assert len(served) == 4000 and all(each.first > 0 or each in served[-200:] for each in served)
        first = sorted(each.first for each in served)
        found[name] = sum(each.held for each in served) / 4000, first[3960]
    assert found["router"][0] > found["two"][0] + 0.2 and found["router"][0] > found["round"][0] + 0.2
    assert found["router"][1] < found["two"][1]


def test_the_table(capsys):
    assert main(["--engines", "2", "--least", "300", "--requests", "1", "--adapters", "20", "--gpu", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Llama-3.1-8B on an H100" in lines[1]
    assert [line.split()[:2] for line in lines[-3:]] == [["2", "router"], ["2", "two"], ["2", "round"]]
