"""aLoRA: the base computes a prompt up to the last occurrence of the adapter's invocation, and shares these pages."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Continuation, Request
from sidestream.runtime.scheduler.sequence import find_activation
from support.engines import VOCABULARY, ask, assert_idle, greedy, make_engine, prompt, random_prompt, run, tokens
from support.fake_runner import continuation

INVOCATION = (1, 2, 1)


def place_of(ids: list[int], invocation: tuple[int, ...] = INVOCATION) -> int:
    """The last occurrence, found in another way."""
    length = len(invocation)
    return max((at for at in range(len(ids) - length + 1) if tuple(ids[at : at + length]) == invocation), default=-1)


def wanted(ids: list[int], adapter: int, count: int, invocation: tuple[int, ...] = INVOCATION) -> list[int]:
    """What the fake model says for an aLoRA adapter."""
    place = place_of(ids, invocation)
    return continuation(ids, adapter if place >= 0 else -1, count, VOCABULARY, max(place, 0))


def clean(length: int, seed: int = 0) -> list[int]:
    """A prompt without the invocation's tokens."""
    source = random.Random(seed)
    return [source.randrange(10, VOCABULARY) for _ in range(length)]


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_the_last_occurrence_is_found(ids, invocation):
    assert find_activation(ids, tuple(invocation)) == place_of(ids, tuple(invocation))


request = st.tuples(
    st.integers(0, 1),  # beginning
    st.sampled_from([0, 1, 63, 64, 65, 130, 200]),  # tokens of it
    st.integers(0, 3),  # invocations after it
    st.integers(1, 70),  # own tokens
    st.integers(1, 50),  # output
    st.integers(-1, 4),  # adapter
    st.integers(0, 30),  # step of arrival
    st.integers(0, 8),  # aborted so many steps later, 0: never
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(request, min_size=1, max_size=12),
    st.integers(8, 30),
    st.integers(1, 6),
    st.sampled_from([8, 33, 200, 1000]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_outputs_are_those_of_each_request_alone(
    requests, pages, max_num_seqs, budget, slots, overlap, asynchronous, speculates, seed
):
    """Base, LoRA (0) and aLoRA (1 to 4) over few pages and slots: eviction, preemption, chunks, drafts."""
    source = random.Random(seed)
    beginnings = [clean(200, seed * 2 + index) for index in range(2)]
    invocations = dict.fromkeys((1, 2, 3), INVOCATION) | {4: (5,)}
    engine = make_engine(
        pages,
        450,
        max_num_seqs,
        budget,
        slots,
        5,
        overlap,
        asynchronous=asynchronous or speculates,
        patience=9,
        hashes={1: "same", 3: "other"},
        invocations=invocations,
        speculation="auto" if speculates else "off",
    )
    prompts, outputs, aborted, step = [], {}, set(), 0
    for which, shared, times, own, *_ in requests:
        ids = beginnings[which][:shared]
        for _ in range(times):
            ids = ids + list(INVOCATION) + random_prompt(source, own // 4)
        prompts.append((ids + random_prompt(source, own))[:390])
    pending = list(enumerate(requests))
    while pending or engine.has_work:
        for index, (*_, count, adapter, _, _) in [entry for entry in pending if entry[1][6] <= step]:
            ask(engine, f"r{index}", prompts[index], count, None if adapter < 0 else f"adapter{adapter}")
        pending = [entry for entry in pending if entry[1][6] > step]
        for output in engine.step()[1]:
            outputs[output.request_id] = output
        for index, (*_, arrival, abort) in enumerate(requests):
            if abort and arrival + abort == step and f"r{index}" not in outputs:
                engine.abort(f"r{index}")
                aborted.add(f"r{index}")
        step += 1
        assert step < 20000
    assert outputs.keys() | aborted == {f"r{index}" for index in range(len(requests))}
    for index, (*_, count, adapter, _, _) in enumerate(requests):
        output, ids = outputs.get(f"r{index}"), prompts[index]
        if output is None:
            continue
        invocation = invocations.get(adapter)
        if invocation is None:
            assert output.adapter_active
            assert output.outputs[0].token_ids == continuation(ids, adapter, count, VOCABULARY)
        else:
            assert output.adapter_active == (place_of(ids, invocation) >= 0)
            assert output.outputs[0].token_ids == wanted(ids, adapter, count, invocation)
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)


@pytest.mark.parametrize("start", [0, 63, 64, 65, 128, 200])
def test_eight_adapters_over_one_prompt_hold_one_copy_of_its_pages(start):
    invocations = dict.fromkeys(range(8), INVOCATION)
    engine = make_engine(60, budget=1000, slots=8, adapters=8, invocations=invocations)
    ids = [*clean(start), *INVOCATION, *clean(10, 1)]
    ask(engine, "base", ids, 1)
    run(engine)
    for adapter in range(8):
        ask(engine, f"r{adapter}", ids, 3, f"adapter{adapter}")
    before = engine.runner.computed
    engine.step()
    shared = start // PAGE_SIZE
    assert engine.scheduler.states.pages.num_used == shared + 8 * (-(-len(ids) // PAGE_SIZE) - shared)
    assert engine.runner.computed - before == 8 * (len(ids) - shared * PAGE_SIZE)
    outputs = run(engine)
    for adapter in range(8):
        assert outputs[f"r{adapter}"].num_cached_tokens == shared * PAGE_SIZE
        assert outputs[f"r{adapter}"].outputs[0].token_ids == wanted(ids, adapter, 3)


def test_the_base_finds_what_an_adapter_computed_before_its_activation():
    engine = make_engine(60, budget=400, slots=1, adapters=2, invocations={0: INVOCATION})
    ids = [*clean(150), *INVOCATION, *clean(100, 1)]
    ask(engine, "first", ids, 1, "adapter0")
    run(engine)
    for name, adapter, cached in (("base", None, 128), ("again", "adapter0", 192), ("lora", "adapter1", 0)):
        ask(engine, name, ids, 1, adapter)
        assert run(engine)[name].num_cached_tokens == cached


def test_equal_pages_with_another_activation_are_not_shared():
    """The second prompt's page 1 has the tokens of the first one's, but there the adapter became active later."""
    engine = make_engine(60, budget=400, slots=1, adapters=1, invocations={0: INVOCATION})
    ids = [*clean(70), *INVOCATION, *clean(53, 1), *INVOCATION[:2]]
    assert len(ids) == 2 * PAGE_SIZE
    for name, end in (("first", [INVOCATION[2], 50]), ("second", [60, 50]), ("third", [INVOCATION[2], 51])):
        ask(engine, name, ids + end, 4, "adapter0")
        outputs = run(engine)
        assert outputs[name].num_cached_tokens == {"first": 0, "second": 64, "third": 128}[name]
        assert tokens(outputs)[name] == wanted(ids + end, 0, 4)


def test_a_chunk_may_hold_both_kinds_and_earlier_ones_run_the_base_s_program():
    engine = make_engine(60, budget=50, slots=1, adapters=1, invocations={0: INVOCATION})
    ids = [*clean(120), *INVOCATION, *clean(40, 1)]
    ask(engine, "r", ids, 3, "adapter0")
    assert tokens(run(engine))["r"] == wanted(ids, 0, 3)
    plans = engine.runner.plans
    assert [plan.uses_lora for plan in plans[:4]] == [False, False, True, True]
    assert plans[2].adapter_index.tolist() == [-1] * 20 + [0] * 30


@pytest.mark.parametrize("enabled", [True, False])
def test_the_base_s_pages_are_computed_while_the_adapter_is_loading(enabled):
    """Without a prefix cache there is nowhere to keep them."""
    engine = make_engine(
        60, budget=50, slots=1, adapters=1, asynchronous=True, prefix_caching=enabled, invocations={0: INVOCATION},
        delay=lambda number: 30,
    )  # fmt: skip
    ids = [*clean(150), *INVOCATION, *clean(40, 1)]
    ask(engine, "r", ids, 3, "adapter0")
    for _ in range(8):
        engine.step()
    assert not engine.scheduler.states.slots.is_resident(0)
    assert engine.runner.computed == (128 if enabled else 0)
    output = run(engine)["r"]
    assert output.outputs[0].token_ids == wanted(ids, 0, 3) and output.num_cached_tokens == 0
    assert engine.runner.computed == len(ids) + 2, "nothing is computed twice"
    assert_idle(engine)


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_wherever_they_are():
    engine = make_engine(
        60, budget=20, slots=1, adapters=1, asynchronous=True, invocations={0: INVOCATION}, failing={0: "no such file"}
    )
    for index in range(2):
        ask(engine, f"r{index}", [*clean(150, index), *INVOCATION, 30], 3, "adapter0")
    outputs = run(engine)
    assert [outputs[name].outputs[0].finish_reason for name in ("r0", "r1")] == ["error", "error"]
    assert engine.runner.started == 1
    assert_idle(engine)


def test_a_moved_stream_keeps_the_activation_of_its_prompt():
    """The tokens of the answer so far hold the invocation again, or for the first time."""
    engine = make_engine(60, budget=400, slots=1, adapters=1, invocations={0: INVOCATION})
    earlier = [*INVOCATION, 40]
    for name, ids in (("moved", [*clean(70), *INVOCATION, 30]), ("absent", clean(70))):
        place = place_of(ids)
        state = (Continuation(earlier),)
        engine.add(Request(name, None, ids, greedy(8), "adapter0", continues=state), stream=True)
        output = run(engine)[name]
        adapter = 0 if place >= 0 else -1
        assert output.outputs[0].token_ids[4:] == continuation(ids + earlier, adapter, 4, VOCABULARY, max(place, 0))
        assert output.adapter_active == (place >= 0)


def test_plain_adapters_keep_their_keys_and_plans():
    """An engine that knows invocations plans a LoRA request as one that does not."""
    plans = []
    for invocations in (None, {1: INVOCATION}):
        engine = make_engine(60, budget=50, slots=2, adapters=2, hashes={0: "x"}, invocations=invocations)
        ask(engine, "r", prompt(100), 3, "adapter0")
        sequence = engine._requests["r"].completions[0].sequence
        run(engine)
        plans.append(([plan.adapter_index.tolist() for plan in engine.runner.plans], sequence.page_keys))
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("turns", "is_refused"),
    [
        ([[*clean(9), *INVOCATION], [5, 6], clean(4), [*INVOCATION, 7]], False),  # not searched in the last answer
        ([[*clean(9), *INVOCATION], [*INVOCATION, 5], clean(4), [6, 7]], True),
        ([[*clean(9), *INVOCATION], [5, 6], [*INVOCATION], [6, 7]], True),
        ([clean(9), [5, 6], [*INVOCATION], [6]], True),
        ([clean(9), [5, 6], clean(3), [6]], False),
    ],
)
def test_answers_with_different_activations_are_not_scored_together(turns, is_refused):
    """The first and third turn are given; the last token of the fourth is sampled, and not in the prompt."""
    engine = make_engine(slots=1, adapters=1, invocations={0: INVOCATION})
    first, second, third, fourth = turns
    ids, start = first + second + third + fourth[:-1], len(first)
    scored = [(start, start + len(second)), (len(ids) - len(fourth) + 1, len(ids))]
    scored = tuple(span for span in scored if span[0] < span[1])
    given = Request("0", None, ids, greedy(1, prompt_logprobs=0), "adapter0", scored=scored)
    if is_refused:
        with pytest.raises(RequestError, match=f"occurs again after token {start}, where scored tokens begin"):
            engine.add(given)
        assert_idle(engine)
    else:
        engine.add(given)
        expected = place_of(first)
        (sequence,) = engine._requests["0"].completions
        assert sequence.sequence.active_from == expected
        run(engine)
