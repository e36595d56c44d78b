"""An answer goes on in another engine as it would have in the first: the demo model, cut at every place."""

import pytest
from sidestream import LLM
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Continuation, Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.text.prompts import check_continues

PROMPT = "Once upon a time there was a small"


@pytest.fixture(scope="module")
def llm():
    with LLM(num_kv_pages=64, max_num_seqs=8, max_model_len=256, max_num_batched_tokens=64) as llm:
        yield llm


def ask(llm, params, adapter=None, continues=(), prompt=PROMPT):
    """The deltas of one request, and its output."""
    ids = llm.tokenizer.encode(prompt)
    llm.engine.add(Request("x", prompt, ids, params, adapter, continues=tuple(continues)), stream=True)
    deltas, outputs = [], []
    while llm.engine.has_work:
        some, done = llm.engine.step()
        deltas += some
        outputs += done
    (output,) = outputs
    return deltas, output


def so_far(deltas, count):
    """What a client has of each of `count` completions after these deltas."""
    mine = [[delta for delta in deltas if delta.index == index] for index in range(count)]
    return [
        Continuation(
            [token for delta in each for token in delta.token_ids],
            sum(len(delta.text) for delta in each),
            any(delta.finish_reason for delta in each),
        )
        for each in mine
    ]


WHOLE = {
    "greedy": SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=16,
        min_tokens=12,
        presence_penalty=0.8,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
        logit_bias={40: 2.0},
    ),
    "logprobs": SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True),
    "ids only": SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True),
    "several": SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=9),
}


@pytest.mark.parametrize("name", WHOLE)
def test_it_goes_on_wherever_it_was_cut(llm, name):
    params = WHOLE[name]
    deltas, output = ask(llm, params)
    for cut in range(1, len(deltas), 3 if params.n == 1 else 7):
        llm.reset_prefix_cache()
        rest, again = ask(llm, params, continues=so_far(deltas[:cut], params.n))
        assert sorted(rest, key=lambda delta: delta.index) == sorted(deltas[cut:], key=lambda delta: delta.index), cut
        assert [each.token_ids for each in again.outputs] == [each.token_ids for each in output.outputs]
        assert again.num_cached_tokens <= len(again.prompt_token_ids)


def test_with_an_adapter_and_its_pages_in_the_cache(llm):
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    adapter = llm.adapters[0]
    deltas, _ = ask(llm, params, adapter)
    rest, again = ask(llm, params, adapter, so_far(deltas[:70], 1))
    assert rest == deltas[70:]
    assert again.num_cached_tokens == min(64, len(again.prompt_token_ids)), "counts the prompt's tokens only"


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_that_lies_across_the_cut(llm, keep):
    _, plain = ask(llm, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    text = plain.outputs[0].text
    stop = text[len(text) // 2 - 6 : len(text) // 2 + 3]
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=keep, logprobs=0
    )
    deltas, output = ask(llm, params)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == stop
    for cut in range(1, len(deltas), 2):
        rest, _ = ask(llm, params, continues=so_far(deltas[:cut], 1))
        assert rest == deltas[cut:], cut
    assert "".join(delta.text for delta in deltas).endswith(stop) is keep


def test_text_that_was_held_back_is_not_lost(llm):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    deltas, output = ask(llm, params)
    (known,) = so_far(deltas[:6], 1)
    rest, _ = ask(llm, params, continues=[Continuation(known.token_ids, known.characters - 3)])
    text = output.outputs[0].text
    assert "".join(delta.text for delta in rest) == text[known.characters - 3 :]


def test_an_unseeded_sample_goes_on_from_its_tokens(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    deltas, _ = ask(llm, params)
    rest, again = ask(llm, params, continues=so_far(deltas[:5], 1))
    assert len(rest) == 7 and again.outputs[0].token_ids[:5] == [delta.token_ids[0] for delta in deltas[:5]]


def test_more_text_than_the_tokens_have_is_refused_and_nothing_is_queued(llm):
    ids = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(n=2, max_tokens=8)
    continues = (Continuation(ids[:2], 1), Continuation(ids[:2], 10_000))
    with pytest.raises(RequestError, match=r"continues\[1\].characters=10000 exceeds the \d+ characters"):
        llm.engine.add(Request("x", PROMPT, ids, params, continues=continues), stream=True)
    assert not llm.engine.has_work and not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    ("continues", "text"),
    [
        ([Continuation([1])], "1 entries for n=2 completions"),
        ([Continuation([1], 0, True)] * 2, "every completion in continues is finished"),
        ([Continuation([1]), Continuation([1] * 8)], r"continues\[1\] has 8 tokens.*max_tokens=8"),
        ([Continuation([1]), Continuation([97])], r"continues\[1\] names a token outside.*97"),
        ([Continuation([1]), Continuation([1] * (1 << 18), 0, True)], "more than 262144 tokens"),
    ],
)
def test_what_cannot_go_on_is_refused(continues, text):
    with pytest.raises(RequestError, match=text):
        check_continues(continues, 4, SamplingParams(n=2, max_tokens=8), 97, 64)
    check_continues(
        [Continuation([1] * 7), Continuation([96] * 8, 0, True)], 4, SamplingParams(n=2, max_tokens=8), 97, 64
    )
