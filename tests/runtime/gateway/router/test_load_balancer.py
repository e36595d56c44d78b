"""Routing decisions: single rules, and invariants over random histories."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sidestream.runtime.gateway.router.load_balancer import (
    FIRST_BACKOFF,
    MAX_BACKOFF,
    EngineReport,
    LoadBalancer,
    RoutingDecision,
    Rules,
)
from sidestream.runtime.gateway.router.prefix_index import prefix_keys

KNOWN = frozenset(f"a{index}" for index in range(9))


def report(status="ok", asked=0.0, capacity=32, slots=4, open=0, places=None, known=KNOWN) -> EngineReport:
    return EngineReport(status, asked, capacity, slots, open, places, known)


def make_balancer(count=3, **fields) -> LoadBalancer:
    balancer = LoadBalancer(source=random.Random(7))
    for index in range(count):
        balancer.add(f"e{index}")
        balancer.report(f"e{index}", report(**fields), 0.0)
    return balancer


def send(balancer: LoadBalancer, adapter=None, keys=(), now=0.0, count=1) -> list[tuple[str, str]]:
    """Requests that stay open: where each went, and why."""
    went = []
    for _ in range(count):
        choice = balancer.choose(adapter, keys, now)
        balancer.start_request(choice.engine, adapter, keys, now)
        went.append((choice.engine, choice.reason))
    return went


def test_requests_for_the_base_are_shared_out_evenly():
    went = [engine for engine, reason in send(make_balancer(), count=30) if reason == "least loaded"]
    assert sorted(map(went.count, ("e0", "e1", "e2"))) == [10, 10, 10]


def test_an_engine_that_runs_twice_as_many_gets_twice_as_many():
    balancer = make_balancer(2)
    balancer.report("e1", report(capacity=64), 0.0)
    went = [engine for engine, _ in send(balancer, count=30)]
    assert went.count("e1") == 20


def test_what_others_have_open_counts_as_load():
    balancer = make_balancer(2)
    balancer.report("e0", report(open=10), 0.0)
    assert [engine for engine, _ in send(balancer, count=10)] == ["e1"] * 10
    balancer.report("e1", report(open=10), 0.0)  # its ten are our own
    assert sorted({engine for engine, _ in send(balancer, count=4)}) == ["e0", "e1"]


def test_an_adapters_requests_stay_where_it_is():
    balancer = make_balancer()
    first = send(balancer, "a0")
    assert first[0][1] == "adapter new"
    assert send(balancer, "a0", count=3) == [(first[0][0], "adapter on gpu")] * 3


def test_a_new_adapter_goes_where_slots_are_free():
    balancer = make_balancer(2)
    balancer.report("e0", report(places={name: "gpu" for name in ("a1", "a2", "a3", "a4")}), 0.0)
    send(balancer, count=1)
    balancer = make_balancer(2)
    balancer.report("e0", report(places={name: "gpu" for name in ("a1", "a2", "a3", "a4")}), 0.0)
    balancer.report("e1", report(open=3), 0.0)
    assert send(balancer, "a0") == [("e1", "adapter new")]


def test_host_memory_is_better_than_nothing_and_the_gpu_better_than_host_memory():
    balancer = make_balancer()
    balancer.report("e1", report(places={"a0": "cpu"}), 0.0)
    assert (
        balancer.choose("a0", (), 0.0).engine == "e1"
        and balancer.choose("a0", (), 0.0).reason == "adapter in host memory"
    )
    balancer.report("e2", report(places={"a0": "gpu"}), 0.0)
    assert balancer.choose("a0", (), 0.0).engine == "e2"


def test_a_hot_adapter_spreads_and_then_all_its_engines_are_used():
    balancer = make_balancer()
    went = send(balancer, "a0", count=60)
    reasons = [reason for _, reason in went]
    assert 2 <= reasons.count("spread: hot") <= 6, "not one by one, not to and fro"
    engines = [engine for engine, _ in went]
    assert min(map(engines.count, ("e0", "e1", "e2"))) >= 15
    assert sorted(balancer.holders("a0")) == ["e0", "e1", "e2"]


def test_what_a_report_does_not_hold_any_more_is_forgotten_but_not_what_was_sent_since_it_was_asked():
    balancer = make_balancer()
    (engine, _), *_ = send(balancer, "a0", now=5.0)
    balancer.report(engine, report(asked=4.9, places={}), 5.1)
    assert balancer.holders("a0") == [engine], "the report is older than the request"
    balancer.report(engine, report(asked=5.2, places={"a1": "gpu"}), 5.3)
    assert balancer.holders("a0") == [] and balancer.holders("a1") == [engine]
    balancer.report(engine, report(asked=6.0, places=None), 6.0)
    assert balancer.holders("a1") == [engine]


def test_a_known_beginning_breaks_a_tie_and_no_more():
    balancer = make_balancer()
    keys = prefix_keys(list(range(64 * 40)), None)
    ((engine, _),) = send(balancer, None, keys)
    assert send(balancer, None, keys) == [(engine, "prefix")]
    balancer.report(engine, report(open=12), 0.0)
    assert all(other != engine for other, _ in send(balancer, None, keys)), "ten requests outweigh it"
    assert balancer.choose("a0", prefix_keys(list(range(64 * 40)), "a0"), 0.0).reason == "adapter new", (
        "another adapter's pages"
    )


def test_an_alora_adapter_is_loaded_where_the_base_has_computed_a_long_beginning():
    balancer = make_balancer()
    balancer.report("e0", report(places={"a0": "gpu"}), 1.0)
    short, long = (prefix_keys(list(range(64 * pages)), None) for pages in (16, 40))
    balancer.start_request("e1", None, long, 1.0)
    balancer.start_request("e2", None, [], 1.0)
    balancer.start_request("e0", None, [], 1.0)
    assert balancer.choose("a0", long, 1.0, shares_base=True) == RoutingDecision("e1", "prefix")
    assert balancer.choose("a0", long, 1.0).engine == "e0", "plain LoRA"
    assert balancer.choose("a0", short, 1.0, shares_base=True).engine == "e0", "loading takes longer than 16 pages"
    assert balancer.choose("a0", long, 1.0, {"e1"}, shares_base=True).engine == "e0"
    balancer.report("e1", report(open=12), 1.0)
    assert balancer.choose("a0", long, 1.0, shares_base=True).engine == "e0", "ten requests outweigh it"


def test_the_longer_beginning_wins():
    balancer = make_balancer()
    short, long = list(range(64 * 4)), list(range(64 * 16))
    balancer.start_request("e0", None, prefix_keys(short, None), 0.0)
    balancer.start_request("e1", None, prefix_keys(long, None), 0.0)
    balancer.start_request("e2", None, [], 0.0)
    assert balancer.choose(None, prefix_keys(long, None), 0.0).engine == "e1"
    assert balancer.choose(None, prefix_keys(short, None), 0.0).engine == "e1", "the last that was given it"


def test_pages_and_adapters_of_an_engine_that_died_are_gone():
    balancer = make_balancer(2)
    keys = prefix_keys(list(range(640)), None)
    send(balancer, None, keys)
    ((_, _),) = send(balancer, "a0")
    balancer.mark_lost("e0", 0.0)
    balancer.mark_lost("e1", 0.0)
    for name in ("e0", "e1"):
        balancer.report(name, report(), 1.0)
    assert balancer.holders("a0") == [] and balancer.choose(None, keys, 1.0).reason == "least loaded"


def test_nothing_goes_to_an_engine_that_stops_loads_or_is_gone():
    balancer = make_balancer(4)
    for name, status in (("e0", "draining"), ("e1", "loading"), ("e2", "dead")):
        balancer.report(name, report(status), 0.0)
    assert {engine for engine, _ in send(balancer, count=9)} == {"e3"}
    balancer.mark_lost("e3", 0.0)
    assert balancer.choose(None, (), 0.0) is None
    balancer.report("e0", report(), 1.0)
    assert balancer.choose(None, (), 1.0).engine == "e0", "it is used again"
    balancer.remove("e0")
    assert balancer.choose(None, (), 1.0) is None and balancer.choose("a0", (), 1.0) is None


def test_a_refusal_counts_at_once():
    balancer = make_balancer(2)
    balancer.set_status("e0", "draining", 0.0)
    assert {engine for engine, _ in send(balancer, count=5)} == {"e1"} and balancer.status("e0") == "draining"


def test_a_stalled_engine_is_better_than_none():
    balancer = make_balancer(2)
    balancer.report("e0", report("stalled"), 0.0)
    assert {engine for engine, _ in send(balancer, count=5)} == {"e1"}
    balancer.mark_lost("e1", 0.0)
    assert send(balancer, "a0") == [("e0", "all stalled")]


def test_an_engine_that_dies_again_and_again_rests_longer_each_time():
    balancer, now, rests = make_balancer(1), 0.0, []
    for _ in range(12):
        balancer.mark_lost("e0", now)
        balancer.mark_lost("e0", now)  # told twice, died once
        balancer.report("e0", report(), now)
        assert balancer.choose(None, (), now) is None
        rests.append(balancer.next_backoff_end() - now)
        now = balancer.next_backoff_end()
        assert balancer.choose(None, (), now).engine == "e0"
    assert (
        rests[:3] == pytest.approx([FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]) and rests[-1] == MAX_BACKOFF
    )
    balancer.start_request("e0", None, (), now)
    balancer.finish_request("e0", True, now)
    balancer.mark_lost("e0", now)
    balancer.report("e0", report(), now)
    assert balancer.next_backoff_end() - now == pytest.approx(FIRST_BACKOFF), "an answer wipes it out"


def test_only_engines_that_have_the_adapter_get_its_requests():
    balancer = make_balancer(3)
    balancer.report("e1", report(known=frozenset({"rare"}), open=20), 0.0)
    assert send(balancer, "rare") == [("e1", "adapter new")]
    assert balancer.choose("rare", (), 0.0, {"e1"}) is None and balancer.choose("nobody's", (), 0.0) is None
    balancer.report("e2", report(known=None), 0.0)
    assert balancer.choose("nobody's", (), 0.0).engine == "e2"


def test_engines_by_name():
    balancer = make_balancer(1)
    with pytest.raises(ValueError, match="'e0' exists already"):
        balancer.add("e0")
    balancer.remove("e0")
    balancer.finish_request("e0", True, 0.0)  # its requests end later
    balancer.add("e0")
    assert balancer.status("e0") == "lost" and balancer.load("e0") == 0.0


def test_fifty_adapters_stay_on_three_engines_under_even_load():
    """Twenty slots each, 24 requests are open at any time; reports come once for 200 requests."""
    source, balancer, now = random.Random(3), make_balancer(3, slots=20, known=None), 0.0
    slots: dict[str, dict[str, None]] = {f"e{index}": {} for index in range(3)}  # least recently used first
    open_requests, held = [], []
    for number in range(4000):
        now += 0.001
        adapter = f"adapter{source.randrange(50)}"
        choice = balancer.choose(adapter, (), now)
        balancer.start_request(choice.engine, adapter, (), now)
        resident = slots[choice.engine]
        held.append(adapter in resident)
        resident.pop(adapter, None)
        resident[adapter] = None
        if len(resident) > 20:
            del resident[next(iter(resident))]
        open_requests.append(choice.engine)
        if len(open_requests) > 24:
            balancer.finish_request(open_requests.pop(source.randrange(25)), True, now)
        if number % 200 == 0:
            for name, resident in slots.items():
                balancer.report(
                    name, report(asked=now, slots=20, places=dict.fromkeys(resident, "gpu"), known=None), now
                )
    assert sum(held[500:]) / len(held[500:]) >= 0.97


class History(RuleBasedStateMachine):
    """Random reports, deaths, requests and answers; the balancer is asked, and held against what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = Rules()
        self.balancer = LoadBalancer(self.rules, random.Random(1))
        self.now = 0.0
        self.status: dict[str, str] = {}
        self.known: dict[str, frozenset[str] | None] = {}
        self.own: dict[str, list[str | None]] = {}
        self.rests: dict[str, float] = {}
        for index in range(5):
            self.balancer.add(f"e{index}")
            self.status[f"e{index}"], self.own[f"e{index}"], self.known[f"e{index}"] = "lost", [], None

    engines = st.sampled_from([f"e{index}" for index in range(5)])
    adapters = st.sampled_from([None, "a0", "a1", "a2"])

    @rule(
        name=engines,
        status=st.sampled_from(["ok"] * 6 + ["loading", "stalled", "draining", "dead"]),
        capacity=st.sampled_from([1, 4, 64]),
        open=st.integers(0, 20),
        places=st.none() | st.dictionaries(st.sampled_from(["a0", "a1", "a2"]), st.sampled_from(["gpu", "cpu"])),
        known=st.sampled_from([None, frozenset({"a0", "a1"}), frozenset({"a0", "a1", "a2"})]),
        age=st.floats(0, 2),
    )
    def told(self, name, status, capacity, open, places, known, age):
        self.balancer.report(name, EngineReport(status, self.now - age, capacity, 2, open, places, known), self.now)
        self.status[name], self.known[name] = status, known

    @rule(name=engines)
    def died(self, name):
        self.balancer.mark_lost(name, self.now)
        self.status[name] = "lost"

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 40.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(adapter=adapters, pages=st.integers(0, 5), excluded=st.sets(engines, max_size=2))
    def asked(self, adapter, pages, excluded):
        keys = prefix_keys(list(range(64 * pages)), adapter)
        choice = self.balancer.choose(adapter, keys, self.now, excluded)

        def fits(name: str) -> bool:
            return name not in excluded and (adapter is None or self.known[name] is None or adapter in self.known[name])

        resting = {engine.name for engine in self.balancer._backing_off}
        usable = {name for name, status in self.status.items() if status == "ok" and fits(name)} - resting
        stalled = {name for name, status in self.status.items() if status == "stalled" and fits(name)}
        if choice is None:
            assert not usable and not stalled
            return
        assert choice.engine in (usable or stalled), "healthy, not excluded, and it has the adapter"
        if not usable:
            assert choice.reason == "all stalled"
            return
        loads = {name: self.balancer.load(name) for name in usable}
        least = min(loads.values())
        if adapter is None:
            assert choice.reason in ("least loaded", "prefix")
            assert loads[choice.engine] <= least + (self.rules.prefix_share if choice.reason == "prefix" else 0.0)
        else:
            holders = set(self.balancer.holders(adapter)) & usable
            smallest = {name for name in usable if loads[name] == least}
            bounds = [self.balancer._load_bound(self.balancer._engines[name]) for name in smallest]
            room = [bound + self.rules.room_share for bound in bounds]
            if holders and min(loads[name] for name in holders) <= min(bounds):
                assert choice.engine in holders and choice.reason in ("adapter on gpu", "prefix")
            if choice.reason == "adapter on gpu":
                assert loads[choice.engine] <= max(room)
            if choice.reason == "adapter new":
                assert not holders
        self.balancer.start_request(choice.engine, adapter, keys, self.now)
        self.own[choice.engine].append(adapter)
        if adapter is not None:
            assert choice.engine in self.balancer.holders(adapter)

    @precondition(lambda self: any(self.own.values()))
    @rule(data=st.data(), answered=st.booleans())
    def ended(self, data, answered):
        name = data.draw(st.sampled_from(sorted(name for name, own in self.own.items() if own)))
        self.own[name].pop()
        self.balancer.finish_request(name, answered, self.now)

    @invariant()
    def counts_agree(self):
        for name, engine in self.balancer._engines.items():
            assert engine.own_requests == len(self.own[name])
            assert set(engine.gpu_lru) == {adapter for adapter, place in engine.places.items() if place == "gpu"}
            for adapter, place in engine.places.items():
                assert name in self.balancer.holders(adapter, place)
        assert all(len(pool) for pool in self.balancer._holders.values())


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_prefill_engines_get_prompts_only():
    balancer = make_balancer(1)
    for name in ("p0", "p1"):
        balancer.add(name, is_prefill=True)
        balancer.report(name, report(), 0.0)
    assert {engine for engine, _ in send(balancer, count=9)} == {"e0"}
    for weight, expected in ((4.0, "p0"), (1.0, "p1"), (1.0, "p1"), (3.0, "p1"), (1.0, "p0")):
        chosen = balancer.choose(None, (), 0.0, prefill=True)
        if weight == 4.0:  # a tie
            first = chosen.engine
        assert (chosen.engine == first) == (expected == "p0")
        balancer.start_request(chosen.engine, None, (), 0.0, weight)
    balancer.mark_lost("p0", 0.0)
    balancer.mark_lost("p1", 0.0)
    assert balancer.choose(None, (), 0.0, prefill=True) is None
    assert balancer.choose(None, (), 0.0).engine == "e0"


def test_pages_that_a_decode_engine_has_seen():
    balancer = make_balancer(1)
    balancer.add("p0", is_prefill=True)
    keys = prefix_keys(list(range(64 * 4)), None)
    balancer.start_request("p0", None, keys, 0.0)
    assert balancer.cached_pages(keys) == 0
    balancer.start_request("e0", None, keys[:2], 0.0)
    assert balancer.cached_pages(keys) == 2
    balancer.mark_lost("e0", 0.0)
    assert balancer.cached_pages(keys) == 0
