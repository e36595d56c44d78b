"""Migrating streams, and the router's data structures."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.api.errors import DeadlineError, EngineDeadError, OverloadedError
from sidestream.runtime.api.request import Continuation
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.router.adapter_catalogue import AdapterCatalogue, OfferedAdapter
from sidestream.runtime.gateway.router.least_loaded import LoadHeap, RandomPool
from sidestream.runtime.gateway.router.prefix_index import ENGINES_PER_KEY, PrefixIndex, prefix_keys
from sidestream.runtime.gateway.router.stream_migration import MAX_FRUITLESS_MIGRATIONS, MAX_MIGRATIONS, MigratingStream
from sidestream.runtime.protocol.adapter_map import AdapterEntry, AdapterMap, HybridClock, Stamp
from sidestream.runtime.protocol.messages import AdapterInfo, Chunk, TokenLogprob, Usage


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 1.0, 2.0, None])), max_size=200), st.integers(0, 6))
def test_the_first_is_a_smallest_that_fits(changes, unfit):
    ranking, keys = LoadHeap(random.Random(0)), {}
    for member, key in changes:
        if key is None:
            ranking.discard(member)
            keys.pop(member, None)
        else:
            ranking.put(member, key)
            keys[member] = key
        found = ranking.first(lambda member: member != unfit)
        fitting = {member: key for member, key in keys.items() if member != unfit}
        assert (found is None) == (not fitting)
        assert found is None or keys[found] == min(fitting.values())
        assert len(ranking._heap) <= 64 + 4 * 7 + 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=100))
def test_a_pool_is_a_set(changes):
    pool, expected = RandomPool(), set()
    for member, there in changes:
        (pool.add if there else pool.discard)(member)
        (expected.add if there else expected.discard)(member)
        assert set(pool.some(10, random.Random(0))) == expected and len(pool) == len(expected)
        assert set(pool.some(3, random.Random(0))) <= expected


def test_chains_agree_as_far_as_prompts_do():
    ids = list(range(64 * 9))
    keys = prefix_keys(ids, None)
    assert len(keys) == 4, "after 1, 2, 4 and 8 pages"
    assert prefix_keys(ids[: 64 * 5] + [0] * 400, None)[:3] == keys[:3] and prefix_keys(ids[:63], None) == []
    assert prefix_keys(ids[: 64 * 5] + [0] * 400, None)[3] != keys[3]
    assert not set(prefix_keys(ids, "a")) & set(keys)
    text = "héllo \ud800" * 300
    assert prefix_keys(text[:1100], None) == prefix_keys(text, None)[:3]


def test_the_engines_that_saw_a_beginning_last():
    prefixes, keys = PrefixIndex(max_keys=8), prefix_keys(list(range(640)), None)
    for number in range(ENGINES_PER_KEY + 2):
        prefixes.add(keys, number)
    pages, engines = prefixes.engines(keys)[0]
    assert pages == 8 and engines == (5, 4, 3, 2)
    for number in range(3):
        prefixes.add(prefix_keys([number] * 128, None), 9)
    assert len(prefixes) == 8 and len(prefixes.engines(keys)) == 2, "what was not used for longest is forgotten"


def info(name, content="c"):
    return AdapterInfo(name, 8, content, "disk")


def test_the_catalogue_says_what_an_engine_lacks():
    catalogue = AdapterCatalogue(HybridClock("me"))
    a, b = (catalogue.new_entry(name, f"/{name}", name) for name in "ab")
    gone = catalogue.new_entry("c")
    for entry in (a, b, gone):
        catalogue.adopt(entry)
    adapters = {"a": info("a", "a"), "b": info("b", "old"), "c": info("c"), "d": info("d")}
    assert catalogue.missing(AdapterMap([a]), adapters) == [b, gone]
    assert catalogue.missing(AdapterMap([a, b, gone]), {"a": info("a", "a")}) == [b], "it could not be read there"
    later = AdapterEntry("b", catalogue.new_entry("b").stamp, "/later", "later")
    assert catalogue.missing(AdapterMap([a, later, gone]), {"a": info("a", "a"), "b": info("b", "later")}) == []
    with catalogue.changing("b"):
        assert catalogue.missing(AdapterMap(), {}) == [a, gone] and catalogue.required_content("b") == "b"
    assert catalogue.required_content("b") == "b" and catalogue.required_content("d") == ""
    catalogue.set_offered({"a": OfferedAdapter("a", "/a", "v1", 8)})
    assert catalogue.missing(AdapterMap(), {}) == [b, gone], "it is loaded at its first request"
    catalogue.set_offered({})
    assert catalogue.is_unloaded("a") and catalogue.missing(AdapterMap(), {})[-1].name == "a"


def test_a_change_from_the_far_future_is_not_adopted():
    catalogue = AdapterCatalogue(HybridClock("me", lambda: 1000.0))
    catalogue.adopt(AdapterEntry("x", Stamp(1_100_000, 0, "evil"), "/x", "c"))
    assert catalogue.required_content("x") == "" and catalogue.new_entry("x").stamp.milliseconds == 1_000_000


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


def stream_of(clock=None, n=1, **fields) -> MigratingStream:
    return MigratingStream(EngineRequest("r", [1, 2], SamplingParams(n=n), **fields), clock or Clock())


def test_the_next_engine_is_told_what_the_caller_has():
    stream = stream_of(n=2)
    assert stream.continuations() == ()
    stream.receive([Chunk("r", 0, 0, "ab", [5, 6]), Chunk("r", 1, 0, "x", [7], "stop")])
    stream.receive([Chunk("r", 0, 2, "é", [8])])
    assert stream.continuations() == (Continuation([5, 6, 8], 3), Continuation([7], 1, True))


def test_a_request_that_continues_keeps_its_output_for_the_next_engine():
    given = (Continuation([5, 6], 2), Continuation([7, 8], 1))
    stream = stream_of(n=2, continues=given)
    assert stream.continuations() == given and stream.required_content == ""
    stream.receive([Chunk("r", 1, 2, "x", [9])])
    assert stream.continuations() == (given[0], Continuation([7, 8, 9], 2)) and given[1].token_ids == [7, 8]


def test_what_the_caller_took_directly_it_has_and_what_it_refused_it_has_not():
    taken = []

    def direct(chunk):
        taken.append(chunk)
        return len(taken) == 1

    stream = stream_of(direct=direct)
    stream.receive([Chunk("r", 0, 0, "a", [5])])
    assert stream.offer_direct(Chunk("r", 0, 1, "b", [6])) and not stream.offer_direct(Chunk("r", 0, 2, "c", [7]))
    assert stream.continuations() == (Continuation([5, 6], 2),)
    assert not stream_of().offer_direct(Chunk("r", 0, 1, "b", [6])), "nobody takes chunks directly"


def test_usage_counts_from_the_beginning():
    clock = Clock()
    stream = stream_of(clock)
    clock.now = 12.0
    stream.receive([Chunk("r", 0, 0, "a", [5])])
    stream.migrate(EngineDeadError("dead"))
    clock.now = 15.0
    (last,) = stream.receive([Chunk("r", 0, 1, "b", [6], "length", usage=Usage(2, 2, 1, 0.1, 0.2))])
    assert last.usage == Usage(2, 2, 1, 2.0, 5.0) and stream.ended
    untouched = Chunk("r", 0, 0, "b", [6], "length", usage=Usage(2, 1, 1, 0.1, 0.2))
    assert stream_of().receive([untouched]) == [untouched]


def test_a_whole_answer_comes_once_whatever_dies_in_between():
    stream = stream_of(stream=False)
    assert not stream.engine_streams
    stream.migrate(EngineDeadError("dead"))
    assert stream.engine_streams and stream.continuations() == (), "nothing of it was known"
    for _ in range(MAX_FRUITLESS_MIGRATIONS - 1):
        stream.migrate(EngineDeadError("dead"))
    assert stream.receive([Chunk("r", 0, 0, "", [1, 2])]) == []
    stream.migrate(EngineDeadError("dead"))
    assert stream.continuations() == (Continuation([1, 2], 0),), "from now on it goes on where it was"
    chunks = stream.receive([Chunk("r", 0, 2, "abc", [3], "length", usage=Usage(2, 3))])
    assert [chunk.token_ids for chunk in chunks] == [[1, 2], [3]] and stream.ended


def test_a_prompt_that_is_scored_again_is_told_once():
    def scores(*tokens):
        return Chunk("r", 0, 0, "", [], prompt_logprobs=[[TokenLogprob(token, -1.0, 1)] for token in tokens])

    stream = stream_of()
    assert stream.receive([scores(1, 2), scores(3)]) == [scores(1, 2), scores(3)]
    stream.migrate(EngineDeadError("dead"))
    assert stream.continuations() == (), "no token is there yet"
    assert stream.receive([scores(1)]) == []
    token = Chunk("r", 0, 0, "a", [9])
    assert stream.receive([scores(2, 3, 4, 5), token]) == [scores(4, 5), token]


def test_an_answer_that_a_stopping_engine_cut_is_not_over():
    with pytest.raises(OverloadedError) as refused:
        stream_of().receive([Chunk("r", 0, 0, "", [], "abort", usage=Usage(2, 0))])
    assert refused.value.code == "draining"


def test_the_deadline_counts_from_arrival_and_moves_are_bounded():
    clock = Clock()
    stream = stream_of(clock, deadline_seconds=3.0)
    clock.now = 12.0
    assert stream.seconds_left() == pytest.approx(1.0) and stream_of(clock).seconds_left() is None
    clock.now = 13.5
    with pytest.raises(DeadlineError):
        stream.seconds_left()
    death = EngineDeadError("dead")
    for _ in range(MAX_FRUITLESS_MIGRATIONS):
        stream.migrate(death)
    with pytest.raises(EngineDeadError):
        stream.migrate(death)
    stream = stream_of()
    for number in range(MAX_MIGRATIONS):
        stream.receive([Chunk("r", 0, number, "a", [5])])
        stream.migrate(death)
    with pytest.raises(EngineDeadError):
        stream.migrate(death)
