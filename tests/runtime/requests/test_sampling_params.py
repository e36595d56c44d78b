"""SamplingParams says at once, and by name, what it cannot do."""

import dataclasses

import pytest
from sidestream.runtime.requests.errors import RequestError
from sidestream.runtime.requests.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams

REFUSED = [
    ({"n": 0}, "n=0"),
    ({"n": MAX_CHOICES + 1}, "n="),
    ({"n": True}, "n=True"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens=17 exceeds max_tokens=16"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop has 65"),
    ({"stop": [3]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {1: 101}}, "logit_bias"),
    ({"stop": "a", "detokenize": False}, "detokenize=True"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
    ({"bad_words": ["x"]}, "bad_words is not supported"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"structured_outputs": {}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(fields, message):
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        SamplingParams(**fields)


def test_defaults_and_spellings():
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens, params.stop_strings, params.stop_ids, params.biases) == (
        1,
        1.0,
        16,
        (),
        (),
        {},
    )
    assert not params.greedy and not params.needs_history
    params = SamplingParams(
        temperature=0,
        top_k=-1,
        stop="a",
        stop_token_ids=[1, 2],
        logit_bias={5: 1},
        frequency_penalty=0.5,
        max_tokens=None,
        min_tokens=3,
        seed=-4,
    )
    assert (
        params.greedy
        and params.needs_history
        and params.stop_strings == ("a",)
        and params.stop_ids == (1, 2)
        and params.biases == {5: 1.0}
    )
    assert dataclasses.replace(params, temperature=0.5).stop_ids == (1, 2)
    assert "stop=('a',)" in repr(params) and "top_p" not in repr(params)
