"""Shared prompt beginnings: never a wrong token, never a page lost or shared wrongly, and what is known is not
computed again.
"""

import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import Request
from sidestream.runtime.scheduler.kv_cache import PageAllocator, next_key, root_key
from support.engines import VOCABULARY, ask, assert_idle, greedy, make_engine, prompt, random_prompt, run, tokens
from support.fake_runner import continuation

# which of three beginnings, how much of it, own tokens after it, output, adapter, step of arrival, step of abort (0 =
# none)
shared_requests = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 260),
        st.integers(1, 80),
        st.integers(1, 90),
        st.integers(-1, 3),
        st.integers(0, 40),
        st.integers(0, 30),
    ),
    min_size=2,
    max_size=14,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shared_requests,
    st.integers(8, 30),
    st.integers(1, 6),
    st.sampled_from([8, 33, 200, 1000]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@example(  # two adapters that took the only slot from each other, each before the other's prompt was computed
    [(0, 176, 1, 46, 3, 23, 0), (0, 260, 29, 49, 0, 0, 0)], 8, 1, 8, 1, False, False, 0
)
def test_outputs_are_those_of_each_request_alone(
    requests, pages, max_num_seqs, budget, slots, overlap, asynchronous, seed
):
    """Shared beginnings, few pages (eviction, preemption), chunked prompts, aborts, adapters that come and go"""
    source = random.Random(seed)
    beginnings = [random_prompt(source, 260) for _ in range(3)]
    engine = make_engine(pages, 450, max_num_seqs, budget, slots, 4, overlap, asynchronous=asynchronous, patience=9)
    prompts = [beginnings[which][:shared] + random_prompt(source, own) for which, shared, own, *_ in requests]
    outputs, pending, step = {}, list(enumerate(requests)), 0
    aborted = set()
    while pending or engine.has_work:
        for index, (*_, count, adapter, _, _) in [entry for entry in pending if entry[1][5] <= step]:
            ask(engine, f"r{index}", prompts[index], count, None if adapter < 0 else f"adapter{adapter}")
        pending = [entry for entry in pending if entry[1][5] > step]
        for output in engine.step()[1]:
            outputs[output.request_id] = output
        for index, (*_, arrival, abort) in enumerate(requests):
            if abort and arrival + abort == step and f"r{index}" not in outputs:
                engine.abort(f"r{index}")
                aborted.add(f"r{index}")
        step += 1
        assert step < 20000
    assert outputs.keys() | aborted == {f"r{index}" for index in range(len(requests))}
    for index, (_, _, _, count, adapter, _, _) in enumerate(requests):
        if f"r{index}" in outputs:
            assert outputs[f"r{index}"].outputs[0].token_ids == continuation(prompts[index], adapter, count, VOCABULARY)
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_known_is_not_computed_again(overlap):
    engine = make_engine(pages=60, budget=64, overlap=overlap)
    ids = prompt(200)
    ask(engine, "first", ids, 5)
    run(engine)
    before = engine.runner.computed
    ask(engine, "again", ids, 5)
    ask(engine, "longer", [*ids, 1, 2, 3], 5)
    assert tokens(run(engine)) == {
        "again": continuation(ids, -1, 5, VOCABULARY),
        "longer": continuation([*ids, 1, 2, 3], -1, 5, VOCABULARY),
    }
    assert engine.runner.computed - before == (200 - 192 + 4) + (203 - 192 + 4), (
        "three full pages of the prompt were found twice"
    )
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (200 + 200 + 203, 192 + 192)
    assert_idle(engine)


def test_at_least_one_token_is_computed():
    engine = make_engine(pages=60, budget=256)
    ids = prompt(2 * PAGE_SIZE)
    for name in "ab":
        ask(engine, name, ids, 3)
        assert tokens(run(engine))[name] == continuation(ids, -1, 3, VOCABULARY)
    assert engine.runner.plans[-3].num_tokens == PAGE_SIZE, (
        "the last page's logits are needed, so that page is computed"
    )


def test_a_conversation_goes_on_where_it_ended():
    engine = make_engine(pages=60, budget=64)
    ids = prompt(70)
    ask(engine, "a", ids, 80)
    answer = tokens(run(engine))["a"]
    before = engine.runner.computed
    ask(engine, "b", ids + answer + [5, 6, 7], 2)
    run(engine)
    assert engine.runner.computed - before == 150 + 3 - 2 * PAGE_SIZE + 1, (
        "pages that were filled while decoding are found as well"
    )


def test_completions_of_one_prompt_compute_it_once():
    engine = make_engine(pages=60, budget=512)
    engine.add(Request("a", None, prompt(300), greedy(4, n=4)))
    outputs = run(engine)["a"].outputs
    assert all(output.token_ids == continuation(prompt(300), -1, 4, VOCABULARY) for output in outputs)
    assert engine.runner.plans[0].num_tokens == 300 + 3 * (300 - 4 * PAGE_SIZE), "within one step already"


def test_adapters_share_only_equal_contents():
    ids = prompt(130)

    def computed(hashes, adapter):
        engine = make_engine(pages=60, budget=256, slots=4, adapters=3, hashes=hashes)
        ask(engine, "a", ids, 1, "adapter0")
        run(engine)
        before = engine.runner.computed
        engine.runner.slots = [0] * 4  # equal contents: the fake model must not tell them apart
        if adapter != "adapter0" and hashes.get(1) == hashes.get(0):
            engine.scheduler.states.slots._slot[1] = 3
            engine.scheduler.states.slots._free.clear()
        elif adapter != "adapter0":
            engine.runner.slots = [0, 1, 1, 1]
        ask(engine, "b", ids, 1, adapter)
        run(engine)
        return engine.runner.computed - before

    assert computed({0: "x", 1: "y"}, "adapter0") == 2
    assert computed({0: "x", 1: "y"}, "adapter1") == 130
    assert computed({0: "x", 1: "x"}, "adapter1") == 2
    assert computed({}, "adapter1") == 130
    assert computed({0: "x"}, None) == 130


def test_a_name_with_a_new_content_finds_nothing_of_the_old():
    hashes = {0: "old", 1: "new"}
    engine = make_engine(pages=60, budget=256, slots=2, adapters=1, hashes=hashes)
    ids = prompt(130)
    ask(engine, "old", ids, 4, "adapter0")
    assert tokens(run(engine))["old"] == continuation(ids, 0, 4, VOCABULARY)
    engine.scheduler.adapter_numbers["adapter0"] = 1
    engine.scheduler.forget_adapter(0)
    ask(engine, "new", ids, 4, "adapter0")
    assert tokens(run(engine))["new"] == continuation(ids, 1, 4, VOCABULARY)
    assert engine.scheduler.stats().prefix_hits == 0 and engine.scheduler.take_retired() == [0]


def test_it_can_be_switched_off():
    engine = make_engine(pages=60, budget=256, prefix_caching=False)
    for name in "ab":
        ask(engine, name, prompt(200), 2)
        run(engine)
    stats = engine.scheduler.stats()
    assert engine.runner.computed == 402 and (stats.prefix_hits, stats.pages_cached) == (0, 0)


def test_memory_is_used_for_the_new_before_the_old_and_beginnings_stay_longest():
    allocator = PageAllocator(6)
    first, second = allocator.allocate(3), allocator.allocate(2)
    for index, page in enumerate([*first, *second]):
        allocator.publish(page, bytes([index]))
    allocator.free(first)
    allocator.free(second)
    assert (allocator.num_free, allocator.num_cached, allocator.num_used) == (6, 5, 0)
    assert allocator.allocate(1) is not None, "the empty page goes first"
    assert allocator.find([b"\0", b"\1", b"\2"]) == first
    taken = allocator.allocate(2)
    assert (
        allocator.find([b"\0", b"\1", b"\2"]) == first[:1]
        and taken == [first[2], first[1]]
        and allocator.evictions == 2
    )
    allocator.share(first[:1])
    assert allocator.num_free == 2 and allocator.allocate(3) is None
    with pytest.raises(ValueError, match="never published"):
        allocator.share(taken)
    with pytest.raises(ValueError, match="has a key"):
        allocator.publish(first[0], b"other")


def test_keys_depend_on_everything_before_them():
    tokens_ = list(range(PAGE_SIZE))
    keys = {
        next_key(root_key(content), ids)
        for content in ("", "content a", "content b")
        for ids in (tokens_, tokens_[::-1])
    }
    assert len(keys) == 6
    assert next_key(next_key(root_key(""), tokens_), tokens_) != next_key(root_key(""), tokens_)


class Allocations(RuleBasedStateMachine):
    """The allocator against a plain model: who holds which page, and which keys are findable."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(8)
        self.held: list[list[int]] = []
        self.keys = {}
        self.serial = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        free = self.allocator.num_free
        pages = self.allocator.allocate(count)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert not {page for group in self.held for page in group} & set(pages), (
                "a page with an owner was handed out"
            )
            self.keys = {key: page for key, page in self.keys.items() if page not in pages}
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.allocator.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def publish(self, data):
        group = data.draw(st.sampled_from([group for group in self.held if group]))
        page = data.draw(st.sampled_from(group))
        if page not in self.keys.values():
            self.serial += 1
            self.keys[str(self.serial).encode()] = page
            self.allocator.publish(page, str(self.serial).encode())

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share(self, data):
        key = data.draw(st.sampled_from(sorted(self.keys)))
        found = self.allocator.find([key, b"unknown"])
        assert found == [self.keys[key]]
        self.allocator.share(found)
        self.held.append(found)

    @invariant()
    def counts(self):
        used = {page for group in self.held for page in group}
        assert self.allocator.num_used == len(used) and self.allocator.num_free == 8 - len(used)
        assert self.allocator.num_cached == len(set(self.keys.values()) - used)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=40, deadline=None)
