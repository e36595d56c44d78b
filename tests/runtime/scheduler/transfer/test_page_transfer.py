"""Pages that a prefill engine holds and a decode engine loads: never a wrong token, and no page is lost."""

import random
from collections.abc import Sequence

import pytest
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import PageOffer, Request
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.host_pages import HostPages
from sidestream.runtime.scheduler.transfer.leased_pages import HELD_SHARE, LEASE_SECONDS, LeasedPages
from support.engines import VOCABULARY, Clock, ask, assert_idle, greedy, make_engine, prompt, random_prompt, run, tokens
from support.fake_runner import continuation


def make_pair(host_pages: int = 40, **options) -> tuple[Engine, Engine, LeasedPages]:
    """A prefill engine, a decode engine that reads its pages, and the directory of these."""
    contents = {number: f"content{number}" for number in range(options.get("adapters", 0))}
    options = {"pages": 20, "budget": 512, "hashes": contents, **options}
    prefill, decode = (
        make_engine(host_pages=host_pages, kv_role="prefill", **options),
        make_engine(kv_role="decode", **options),
    )
    decode.runner.other = prefill.runner
    pages = prefill.scheduler.states.host
    assert isinstance(pages, LeasedPages)
    return prefill, decode, pages


def compute(engine: Engine, name: str, ids: list[int], adapter: str | None = None) -> list[int]:
    """Let the prefill engine compute a prompt; return the places of its pages."""
    pages = engine.scheduler.states.host
    assert isinstance(pages, LeasedPages)
    engine.add(Request(name, None, ids, greedy(1), adapter, prefill_only=True))
    run(engine)
    while (places := pages.places(name)) is None:
        engine.plan()
        engine.take_loads_in()
    return places


def answer(engine: Engine, name: str, ids: list[int], places: Sequence[int], cached: int = 0, **more) -> list[int]:
    """Let the decode engine answer with these pages."""
    ask(engine, name, ids, 6, offer=PageOffer("prefill", tuple(places), cached), **more)
    return tokens(run(engine))[name]


def test_the_decode_engine_computes_only_the_tail():
    prefill, decode, pages = make_pair()
    ids = prompt(200)
    places = compute(prefill, "r", ids)
    assert len(places) == 3
    assert answer(decode, "r", ids, places) == continuation(ids, -1, 6, VOCABULARY)
    assert decode.runner.computed == 200 - 3 * PAGE_SIZE + 5
    assert decode.scheduler.stats().host_pages_loaded == 3
    pages.release("r")
    assert pages.stats()["page_leases"] == pages.stats()["pages_leased"] == 0
    before = decode.runner.computed
    assert answer(decode, "again", ids, []) == continuation(ids, -1, 6, VOCABULARY)
    assert decode.runner.computed - before == 200 - 3 * PAGE_SIZE + 5, "they are in its own prefix cache now"
    assert_idle(decode)
    assert_idle(prefill)


def test_tokens_that_the_prefill_engine_had_count_as_cached():
    prefill, decode, _ = make_pair()
    ids = prompt(200)
    compute(prefill, "first", ids[:130])
    places = compute(prefill, "r", ids)
    ask(decode, "r", ids, 1, offer=PageOffer("prefill", tuple(places), 128))
    assert run(decode)["r"].num_cached_tokens == 128
    ask(decode, "new", prompt(200, 5), 1, offer=PageOffer("prefill", tuple(compute(prefill, "new", prompt(200, 5)))))
    assert run(decode)["new"].num_cached_tokens == 0


def test_only_equal_keys_are_used():
    """Places of another prompt or adapter, too many or too few, beyond the memory, the same one twice"""
    prefill, decode, _ = make_pair(slots=2, adapters=2)
    first, second = prompt(200), prompt(200, 9)
    places, others = compute(prefill, "a", first), compute(prefill, "b", second)
    adapted = compute(prefill, "c", first, "adapter1")
    for index, wrong in enumerate(
        (others, places[::-1], adapted, [places[0], others[1]], [999], [-1], [places[0]] * 2)
    ):
        _, engine, _ = make_pair(slots=2, adapters=2)
        engine.runner.other = prefill.runner
        assert answer(engine, f"r{index}", first, wrong) == continuation(first, -1, 6, VOCABULARY)
        assert engine.scheduler.stats().host_pages_loaded in (0, len(wrong)) and engine.runner.computed >= 200
        assert_idle(engine)
    assert answer(decode, "long", first, [*places, *others]) == continuation(first, -1, 6, VOCABULARY)
    assert decode.scheduler.stats().host_pages_loaded == 3
    assert answer(decode, "adapted", first, adapted, adapter="adapter1") == continuation(first, 1, 6, VOCABULARY)
    assert decode.scheduler.stats().host_pages_loaded == 6


@pytest.mark.parametrize("places", [[10], [150], [191], [192], [197], [20, 195]])
def test_pages_of_an_adapter_that_is_activated_in_the_prompt(places: list[int]):
    """aLoRA, also after the pages that the prefill engine computes"""
    prefill, decode, _ = make_pair(slots=2, adapters=1, invocations={0: (1, 2, 1)})
    ids = [10 + token % 80 for token in prompt(200)]
    for place in places:
        ids[place : place + 3] = [1, 2, 1]
    found = compute(prefill, "r", ids, "adapter0")
    assert answer(decode, "r", ids, found, adapter="adapter0") == continuation(ids, 0, 6, VOCABULARY, places[-1])
    assert decode.scheduler.stats().page_loads_refused == 0
    assert decode.runner.computed == 205 - 3 * PAGE_SIZE


def test_completions_of_one_prompt_share_one_load():
    prefill, decode, _ = make_pair()
    ids = prompt(200)
    offer = PageOffer("prefill", tuple(compute(prefill, "r", ids)))
    decode.add(Request("r", None, ids, greedy(4, n=3), offer=offer))
    outputs = run(decode)["r"].outputs
    assert [each.token_ids for each in outputs] == [continuation(ids, -1, 4, VOCABULARY)] * 3
    assert decode.scheduler.stats().host_pages_loaded == 3


def test_held_pages_stay_until_they_are_released_or_the_lease_expires():
    clock = Clock()
    prefill, decode, pages = make_pair(host_pages=8)
    pages._clock = clock
    ids = prompt(200)
    places = compute(prefill, "r", ids)
    shared = compute(prefill, "same", ids)
    assert shared == places and pages.stats()["pages_leased"] == 3
    held = {place: prefill.runner.host_keys[place] for place in places}
    for index in range(6):
        compute(prefill, f"other{index}", prompt(200, 20 + index))
        pages.release(f"other{index}")
    assert {place: prefill.runner.host_keys[place] for place in places} == held
    pages.release("same")
    assert pages.stats()["pages_leased"] == 3, "the other lease holds them"
    clock.now += LEASE_SECONDS + 1
    prefill.plan()
    assert pages.take_expired() == ["r"] and pages.stats()["page_leases_expired"] == 1
    for index in range(6):
        compute(prefill, f"last{index}", prompt(200, 40 + index))
        pages.release(f"last{index}")
    assert {place: prefill.runner.host_keys[place] for place in places} != held
    assert answer(decode, "late", ids, places) == continuation(ids, -1, 6, VOCABULARY)
    assert decode.scheduler.stats().page_loads_refused == 1


def test_leases_never_hold_all_pages():
    prefill, decode, pages = make_pair(host_pages=8)
    places = [compute(prefill, f"r{index}", prompt(200, index)) for index in range(4)]
    assert [len(each) for each in places] == [3, 3, 0, 0] and sum(map(len, places)) <= HELD_SHARE * 8
    for index, each in enumerate(places):
        ids = prompt(200, index)
        assert answer(decode, f"r{index}", ids, each) == continuation(ids, -1, 6, VOCABULARY)
        pages.release(f"r{index}")
    assert pages.stats()["pages_leased"] == 0
    assert len(compute(prefill, "more", prompt(200, 7))) == 3


def test_pages_of_a_reset_cache_are_not_read():
    prefill, decode, pages = make_pair()
    ids = prompt(200)
    places = compute(prefill, "r", ids)
    assert prefill.scheduler.reset_prefix_cache()
    prefill.plan()
    assert pages.places("r") == [] and not prefill.runner.host_keys
    assert answer(decode, "r", ids, places) == continuation(ids, -1, 6, VOCABULARY)
    assert decode.scheduler.stats().page_loads_refused == 1
    pages.release("r")
    assert len(compute(prefill, "again", ids)) == 3


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_whatever_happens(seed: int):
    """Small memories, slow and failing copies, leases that end at any time, adapters, common beginnings"""
    source = random.Random(seed)
    for _ in range(12):
        prefill, decode, pages = make_pair(source.randint(4, 20), slots=2, adapters=2, pages=source.randint(10, 20))
        for engine in (prefill, decode):
            engine.runner.copy_delay = source.randint(1, 5)
            engine.runner.failing_copies = {ticket for ticket in range(99) if source.random() < 0.05}
        beginnings = [random_prompt(source, 200) for _ in range(2)]
        expected, found = {}, {}
        for index in range(16):
            ids = source.choice(beginnings)[: source.choice((70, 140, 200))] + random_prompt(
                source, source.randint(1, 90)
            )
            adapter = source.choice((-1, 0, 1))
            name = None if adapter < 0 else f"adapter{adapter}"
            places = compute(prefill, f"r{index}", ids, name)
            if source.random() < 0.5:
                pages.release(f"r{index}")
            offer = PageOffer("prefill", tuple(places))
            ask(decode, f"r{index}", ids, 6, name, offer=offer)
            expected[f"r{index}"] = continuation(ids, adapter, 6, VOCABULARY)
            for _ in range(source.choice((0, 2, 9))):
                found |= {each.request_id: each for each in decode.step()[1]}
        found |= run(decode)
        assert tokens(found) == expected
        while decode.scheduler.is_loading:
            decode.take_loads_in()
        for index in range(16):
            pages.release(f"r{index}")
        assert pages.stats()["pages_leased"] == 0
        assert_idle(decode)
        assert_idle(prefill)
        host = prefill.scheduler.states.host
        assert isinstance(host, HostPages) and len(host._free) + len(host._pages) == host.num_pages, "no place is lost"
