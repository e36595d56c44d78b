"""Whatever arrives, in whatever order and however short memory is: every request gets exactly the tokens that it
would get alone.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sidestream.ops.core.kv_layout import PAGE_SIZE, pages_for
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.kv_cache import PageAllocator
from sidestream.runtime.scheduler.scheduler import SchedulerLimits
from support.engines import VOCABULARY, assert_idle, make_engine, prompt, run
from support.fake_runner import continuation

# prompt, output, adapter, step of arrival
requests_strategy = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 90), st.integers(-1, 5), st.integers(0, 30)), min_size=1, max_size=14
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests_strategy,
    st.integers(7, 30),
    st.integers(1, 6),
    st.sampled_from([8, 33, 200, 1000]),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 3),
)
def test_outputs_are_those_of_each_request_alone(requests, pages, max_num_seqs, budget, slots, overlap, owners):
    engine = make_engine(pages, 420, max_num_seqs, budget, slots, 6, overlap)
    outputs, pending, step = {}, list(enumerate(requests)), 0
    while pending or engine.has_work:
        for index, (length, count, adapter, _) in [entry for entry in pending if entry[1][3] <= step]:
            name = None if adapter < 0 else f"adapter{adapter}"
            params = SamplingParams(temperature=0, max_tokens=count)
            ids = prompt(length, index)
            engine.add(Request(f"r{index}", None, ids, params, name, owner=str(index % owners)))
        pending = [entry for entry in pending if entry[1][3] > step]
        for output in engine.step()[1]:
            outputs[output.request_id] = output
        step += 1
        assert step < 20000
    assert len(outputs) == len(requests)
    for index, (length, count, adapter, _) in enumerate(requests):
        completion = outputs[f"r{index}"].outputs[0]
        assert completion.token_ids == continuation(prompt(length, index), adapter, count, VOCABULARY)
        assert completion.finish_reason == "length"
    assert_idle(engine)
    for plan in engine.runner.plans:
        assert plan.num_tokens <= budget and plan.num_sequences <= max_num_seqs


@pytest.mark.parametrize("overlap", [False, True])
def test_each_token_is_computed_once_while_memory_lasts(overlap):
    engine = make_engine(pages=400, budget=50, overlap=overlap)
    for index in range(20):
        engine.add(
            Request(
                str(index), None, prompt(10 + 13 * index, index), SamplingParams(temperature=0, max_tokens=5 + index)
            )
        )
    run(engine)
    assert engine.runner.computed == sum(10 + 13 * index + 5 + index - 1 for index in range(20))


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_happens_and_changes_nothing(overlap):
    engine = make_engine(pages=10, max_model_len=600, budget=128, overlap=overlap)
    for index in range(6):
        engine.add(Request(str(index), None, prompt(60, index), SamplingParams(temperature=0, max_tokens=200)))
    sequences = [live.completions[0].sequence for live in engine._requests.values()]
    outputs = run(engine)
    assert sum(sequence.preemptions for sequence in sequences) > 0
    assert sequences[0].preemptions == 0, "the oldest is never put back"
    for index in range(6):
        assert outputs[str(index)].outputs[0].token_ids == continuation(prompt(60, index), -1, 200, VOCABULARY)
    assert_idle(engine)


def test_decodes_go_on_while_a_long_prompt_is_computed():
    engine = make_engine(pages=100, max_model_len=2000, budget=64)
    engine.add(Request("short", None, prompt(5), SamplingParams(temperature=0, max_tokens=30)), stream=True)
    engine.step()
    engine.add(Request("long", None, prompt(1200), SamplingParams(temperature=0, max_tokens=1)))
    for _ in range(10):
        deltas, _ = engine.step()
        assert [delta.request_id for delta in deltas] == ["short"]
        assert engine.runner.plans[-1].num_tokens == 64, "the prompt fills what the decodes leave"


def test_first_come_first_served():
    engine = make_engine(max_num_seqs=1)
    for index in range(5):
        engine.add(Request(str(index), None, prompt(9, index), SamplingParams(temperature=0, max_tokens=3)))
    assert list(run(engine)) == ["0", "1", "2", "3", "4"]


def test_a_request_without_a_slot_does_not_hold_others_up():
    engine = make_engine(slots=1, adapters=2)
    for name, adapter in (("a", "adapter0"), ("b", "adapter1"), ("c", "adapter0"), ("d", None)):
        engine.add(Request(name, None, prompt(9), SamplingParams(temperature=0, max_tokens=4), adapter), stream=True)
    deltas, _ = engine.step()
    assert [delta.request_id for delta in deltas] == ["a", "d"], (
        "b waits for a slot; c must not, by using adapter0, keep b from it"
    )
    outputs = run(engine)
    assert list(outputs) == ["a", "d", "b", "c"]
    assert_idle(engine)


def test_an_endless_stream_for_resident_adapters_cannot_starve_another():
    engine = make_engine(slots=2, adapters=3, max_num_seqs=8)
    count = 0

    def add(adapter):
        nonlocal count
        engine.add(
            Request(f"{adapter}-{count}", None, prompt(4, count), SamplingParams(temperature=0, max_tokens=6), adapter)
        )
        count += 1

    for step in range(60):
        add("adapter0")
        add("adapter1")
        if step == 5:
            add("adapter2")
        for output in engine.step()[1]:
            if output.adapter == "adapter2":
                assert step < 45
                return
    raise AssertionError("adapter2 was starved")


def test_idle_adapters_stay_resident_and_the_least_recent_makes_room():
    engine = make_engine(slots=2, adapters=3)
    for name in ("adapter0", "adapter1", "adapter0", "adapter2", "adapter0", "adapter1"):
        engine.add(Request(name, None, prompt(4), SamplingParams(temperature=0, max_tokens=2), name))
        run(engine)
    loads = [tuple(load) for plan in engine.runner.plans for load in plan.slot_loads.tolist()]
    assert [number for _, number in loads] == [0, 1, 2, 1]
    assert engine.scheduler.states.slots.resident.keys() == {0, 1}


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_frees_everything_and_leaves_others_alone(overlap):
    engine = make_engine(slots=1, adapters=1, overlap=overlap)
    for index in range(12):
        engine.add(
            Request(str(index), None, prompt(20, index), SamplingParams(temperature=0, max_tokens=40), "adapter0")
        )
    for step in range(12):
        engine.step()
        if step % 3 == 0:
            engine.abort(str(step))
    outputs = run(engine)
    assert outputs.keys() == {str(index) for index in range(12) if index % 3}
    for name, output in outputs.items():
        assert output.outputs[0].token_ids == continuation(prompt(20, int(name)), 0, 40, VOCABULARY)
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_end_of_sequence_and_stop_tokens(overlap):
    expected = continuation(prompt(12), -1, 30, VOCABULARY)
    stop = expected[10]
    first = expected.index(stop)
    engine = make_engine(overlap=overlap, eos=(stop,))
    cases = {
        "eos": SamplingParams(temperature=0, max_tokens=30),
        "ignored": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        "stop": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]),
    }
    for name, params in cases.items():
        engine.add(Request(name, None, prompt(12), params))
    found = {name: output.outputs[0] for name, output in run(engine).items()}
    assert found["eos"].token_ids == found["stop"].token_ids == expected[: first + 1]
    assert (found["eos"].finish_reason, found["eos"].stop_reason) == ("stop", None)
    assert (found["stop"].finish_reason, found["stop"].stop_reason) == ("stop", stop)
    assert found["ignored"].token_ids == expected and found["ignored"].finish_reason == "length"
    assert_idle(engine)


def test_overlap_feeds_tokens_on_the_device():
    engine = make_engine(overlap=True)
    engine.add(Request("a", None, prompt(12), SamplingParams(temperature=0, max_tokens=10)))
    run(engine)
    fed = [len(plan.feed_positions) for plan in engine.runner.plans]
    assert fed == [0] + [1] * 9, "after the prompt, no step waits for the host to learn a token"


def test_rows_with_penalties_wait_for_their_history():
    engine = make_engine(overlap=True)
    engine.add(Request("a", None, prompt(12), SamplingParams(temperature=0, max_tokens=6, presence_penalty=1.0)))
    engine.add(
        Request(
            "b",
            None,
            prompt(12),
            SamplingParams(temperature=0, max_tokens=6, logit_bias={3: 5.0}, min_tokens=2, stop_token_ids=[8]),
        )
    )
    run(engine)
    expected = continuation(prompt(12), -1, 6, VOCABULARY)
    for plan in engine.runner.plans:
        tokens = plan.sampling.history_tokens.tolist()
        if tokens:
            step = int(plan.sampling.steps[plan.sampling.history_rows[0]])
            assert dict(zip(tokens, plan.sampling.history_counts.tolist(), strict=True)) == {
                token: expected[:step].count(token) for token in prompt(12) + expected[:step]
            }
        biased = dict(zip(plan.sampling.bias_tokens.tolist(), plan.sampling.bias_values.tolist(), strict=True))
        if biased:
            assert biased[3] == 5.0
            assert (8 in biased) == (int(plan.sampling.steps[plan.sampling.bias_rows[0]]) < 2)


def test_several_completions_of_one_prompt():
    engine = make_engine()
    engine.add(Request("a", None, prompt(12), SamplingParams(temperature=0, n=3, max_tokens=5)))
    output = run(engine)["a"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(completion.token_ids == continuation(prompt(12), -1, 5, VOCABULARY) for completion in output.outputs)


def test_seeds_differ_between_requests_and_completions_but_not_between_runs():
    def seeds(seed):
        engine = make_engine()
        engine.seed = seed
        engine.add(Request("a", None, prompt(3), SamplingParams(n=2, max_tokens=1)))
        engine.add(Request("b", None, prompt(3), SamplingParams(max_tokens=1)))
        engine.add(Request("c", None, prompt(3), SamplingParams(max_tokens=1, n=2, seed=5)))
        engine.step()
        return engine.runner.plans[0].sampling.seeds.tolist()

    first = seeds(0)
    assert len(set(first)) == 5 and first[3:] == [5, 6]
    assert seeds(0) == first and seeds(1)[:3] != first[:3]


def test_what_can_never_run_is_refused():
    engine = make_engine(max_model_len=100)
    with pytest.raises(RequestError, match="max_model_len=100; shorten the prompt"):
        engine.add(Request("a", None, prompt(100), SamplingParams()))
    with pytest.raises(RequestError, match="max_loras is 0"):
        engine.add(Request("b", None, prompt(10), SamplingParams(), "adapter0"))
    assert not engine.has_work
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        SchedulerLimits(10, 100, 8, 4)
    with pytest.raises(ValueError, match="do not hold one sequence"):
        SchedulerLimits(10, 10 * PAGE_SIZE + 1, 8, 64)


def test_pages():
    allocator = PageAllocator(4)
    first = allocator.allocate(3)
    assert first is not None and len(set(first)) == 3 and allocator.allocate(2) is None and allocator.num_free == 1
    allocator.free(first[:1])
    with pytest.raises(ValueError, match="was not allocated"):
        allocator.free(first[:1])
    assert pages_for(0) == 0 and pages_for(PAGE_SIZE) == 1 and pages_for(PAGE_SIZE + 1) == 2
