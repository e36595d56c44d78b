"""SamplingParams says at once, and by name, what it cannot do."""

import dataclasses
import enum

import numpy as np
import pytest
import torch
from sidestream.runtime.api.beam_search import BeamSearchParams
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from sidestream.runtime.text.prompts import as_list, text_or_ids


class Kind(enum.Enum):
    """As vLLM's RequestOutputKind."""

    FINAL_ONLY = 2


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
    ({"logprobs": -2}, "logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {1: 101}}, "logit_bias"),
    ({"stop": "a", "detokenize": False}, "detokenize=True"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"prompt_logprobs": -2}, "-1 is the whole vocabulary"),
    ({"prompt_logprobs": True}, "prompt_logprobs=True"),
    ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, "needs the whole prompt"),
    ({"skip_reading_prefix_cache": "no"}, "must be True or False"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [-3]}, "allowed_token_ids=-3"),
    ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids has 4097 entries; at most 4096"),
    ({"allowed_token_ids": "abc"}, "allowed_token_ids='abc'"),
    ({"output_kind": 1}, "output_kind=DELTA is not supported; use stream"),
    ({"output_kind": 7}, "output_kind=7"),
    ({"extra_args": {"a": 1}}, "extra_args"),
    ({"flat_logprobs": True}, "flat_logprobs"),
    ({"thinking_token_budget": 0}, "/v1/chat/completions"),
    ({"repetition_detection": {"max_pattern_size": 4}}, "use repetition_penalty"),
    ({"prompt_logprob_start": 0}, "use prompt_logprobs"),
    ({"trace_decode_token_ids": [1]}, "LLM.score"),
    ({"bad_words": "x"}, "bad_words='x' must be a list of words"),
    ({"bad_words": ["x", " "]}, "bad_words holds ' '"),
    ({"bad_words": ["x", 3]}, "bad_words holds 3"),
    ({"bad_words": ["x"] * 257}, "bad_words has 257 words; at most 256"),
    ({"bad_words": ["x" * 64] * 65}, "bad_words has 4160 characters in all"),
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
    params = SamplingParams(allowed_token_ids=[4, 9, 4], bad_words=["x"])
    assert params.allowed_ids == (4, 9) and params.banned_words == ("x",) and not params.needs_history
    assert params.clone() == params and repr(params) == "SamplingParams(bad_words=('x',), allowed_token_ids=(4, 9))"


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": []},
        {"bad_words": None},
        {"allowed_token_ids": None},
        {"prompt_logprobs": None},
        {"logits_processors": []},
        {"best_of": 1},
        {"n": 3, "best_of": 3},
        {"use_beam_search": False},
        {"output_kind": Kind.FINAL_ONLY},
        {"output_kind": 0},
        {"flat_logprobs": False},
        {"skip_reading_prefix_cache": False},
        {"thinking_token_budget": -1},
        {"stream_interval": 4, "skip_clone": True, "routed_experts_prompt_start": 7},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(fields):
    params = SamplingParams(temperature=0.5, **fields)
    assert (params.temperature, params.n) == (0.5, fields.get("n", 1))


def test_clone_and_from_optional():
    params = SamplingParams(n=2, stop=["a"], logit_bias={5: 1}, max_tokens=None)
    copy = params.clone()
    assert copy == params and copy is not params and copy.biases is not params.biases
    made = SamplingParams.from_optional(n=None, temperature=None, stop="a", top_k=None, max_tokens=None, seed=None)
    assert made == SamplingParams(stop="a", max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams.from_optional(temperature=-1.0)


def test_values_of_numpy_and_torch_are_numbers() -> None:
    made = SamplingParams(
        temperature=np.float16(0.5),
        top_p=np.float64(0.25),
        top_k=torch.tensor(7),
        max_tokens=np.int32(9),
        seed=np.uint8(3),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([4, 5]),
        allowed_token_ids=[np.int64(6), torch.tensor(8)],
        logit_bias={np.int16(2): torch.tensor(-1.5)},
        logprobs=torch.tensor(2),
    )
    assert made == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        max_tokens=9,
        seed=3,
        ignore_eos=True,
        stop_token_ids=[4, 5],
        allowed_token_ids=[6, 8],
        logit_bias={2: -1.5},
        logprobs=2,
    )
    assert {type(made.top_k), type(made.max_tokens), type(made.ignore_eos)} == {int, bool}
    assert BeamSearchParams(beam_width=np.int64(2), max_tokens=torch.tensor(3)).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_k": np.float32(3.0)}, "top_k=3.0 must be an integer"),
        ({"max_tokens": np.bool_(True)}, "max_tokens=True must be an integer"),
        ({"temperature": torch.tensor([0.1, 0.2])}, "temperature=.* must be a number"),
        ({"ignore_eos": np.int64(1)}, "ignore_eos=1 must be True or False"),
        ({"n": np.int64(0)}, "n=0 must be an integer from 1"),
    ],
)
def test_numbers_of_numpy_and_torch_are_checked_as_others_are(fields: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("stop", {"stop": ["fine", "\udc80"]}),
        ("bad_words", {"bad_words": ["\ude00x"]}),
        (r"structured_outputs.choice\[1\]", {"structured_outputs": {"choice": ["yes", "\ud800"]}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "[a\udfff]"}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'start: "\ud83d"'}}),
        ("structured_outputs.json", {"structured_outputs": {"json": {"const": "\ud83d"}}}),
        ("structured_outputs.json", {"structured_outputs": {"json": '{"enum": ["\\udabc"]}'}}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_field(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=rf"^{name} holds the lone surrogate '\\ud[0-9a-f]+' at character \d+"):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_the_remedy_for_a_surrogate_works_and_whole_pairs_are_text() -> None:
    text = "a\ud83d b"
    with pytest.raises(RequestError, match="the prompt holds the lone surrogate") as refused:
        text_or_ids(text)
    remedy = str(refused.value).rpartition("replace it: ")[2]
    assert remedy == "text.encode(errors='replace').decode()"
    assert text_or_ids(text.encode(errors="replace").decode()) == ("a? b", None)
    assert SamplingParams(stop="\U0001f600", structured_outputs={"json": '{"const": "\\ud83d\\ude00"}'}).stop


def test_token_ids_of_numpy_and_torch_are_a_prompt() -> None:
    assert text_or_ids([np.int64(3), torch.tensor(4), 5]) == (None, [3, 4, 5])
    assert as_list([np.int32(3), np.int32(4)]) == [[3, 4]]
    with pytest.raises(RequestError, match="this list holds a float"):
        text_or_ids([np.float32(3.5)])
