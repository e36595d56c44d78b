"""Constrained answers of LLM: the greedy ones are those of transformers' `generate` with the same tokens allowed."""

import dataclasses
import json
import sys

import jsonschema
import pytest
import regex
import torch
from sidestream import LLM, RequestError, SamplingParams, StructuredOutputsParams
from support.tiny import TinyBase, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SMALL = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48}
PROMPT = list(b"To be, or not to be: that is the question")
PATTERN = r"([a-f]{2}[0-9]|[g-z ]{1,3}x)+\.[A-Z]{4}"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def llm(base):
    with LLM(base.path, precision="fp32", **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo():
    with LLM(device="cpu", show_progress=False) as llm:
        yield llm


def theirs(base: TinyBase, pattern: str) -> str:
    """By transformers: a byte is allowed where the pattern can still match."""
    ids = torch.tensor([PROMPT])
    whole = regex.compile(pattern)

    def allowed(_batch, made):
        text = bytes(made[len(PROMPT) :].tolist())
        return [byte for byte in range(128) if whole.fullmatch((text + bytes([byte])).decode(), partial=True)] or [0]

    made = base.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None,
        pad_token_id=0, prefix_allowed_tokens_fn=allowed,
    )  # fmt: skip
    return bytes(made[0, len(PROMPT) :].tolist()).rstrip(b"\0").decode()


def constrained(params: SamplingParams = GREEDY, **constraint) -> SamplingParams:
    return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(**constraint))


@pytest.mark.parametrize("ahead", [0, 1])
def test_greedy_answers_are_those_of_transformers(llm, base, ahead):
    """Together with unconstrained requests, which do not change; also with steps planned ahead."""
    expected = theirs(base, PATTERN)
    (free,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    llm.engine._depth = ahead
    try:
        outputs = llm.generate(
            [PROMPT] * 3,
            [GREEDY, constrained(regex=PATTERN), dataclasses.replace(GREEDY, max_tokens=9)],
            use_tqdm=False,
        )
    finally:
        llm.engine._depth = 0
    assert outputs[1].outputs[0].text == expected
    assert outputs[0].outputs[0].token_ids == free.outputs[0].token_ids
    assert outputs[2].outputs[0].token_ids == free.outputs[0].token_ids[:9]


def test_it_ends_when_it_is_complete(llm):
    """Whatever ignore_eos and min_tokens say, as there is nothing left to say."""
    for fields in ({"ignore_eos": True}, {"ignore_eos": False}, {"min_tokens": 20}):
        (output,) = llm.generate(
            [PROMPT], constrained(dataclasses.replace(GREEDY, **fields), choice=["yes", "no"]), use_tqdm=False
        )
        assert output.outputs[0].text in ("yes", "no") and output.outputs[0].finish_reason == "stop"
    (longer,) = llm.generate(
        [PROMPT], constrained(dataclasses.replace(GREEDY, min_tokens=9), regex="a+"), use_tqdm=False
    )
    assert longer.outputs[0].text == "a" * 24 and longer.outputs[0].finish_reason == "length"


def test_other_parameters_count_too(llm):
    def answer(**fields):
        (output,) = llm.generate([PROMPT], dataclasses.replace(GREEDY, **fields), use_tqdm=False)
        return output.outputs[0]

    letters = StructuredOutputsParams(regex="[a-d]{8}")
    assert set(answer(structured_outputs=letters, logit_bias={ord("c"): 100}).text) == {"c"}
    assert set(answer(structured_outputs=letters, allowed_token_ids=list(b"bxyz")).text) == {"b"}
    assert "a" not in answer(structured_outputs=letters, bad_words=["a"]).text
    assert answer(structured_outputs=letters, logit_bias={ord("c"): 100}, stop="cc").text == ""
    assert answer(structured_outputs=letters, logit_bias={ord("c"): 100}, stop_token_ids=[ord("c")]).text == ""
    stuck = answer(structured_outputs=letters, allowed_token_ids=list(b"xyz"))
    assert stuck.finish_reason == "error" and "no token is left to sample" in str(stuck.stop_reason)
    drawn = answer(structured_outputs=letters, temperature=2.0, top_k=2, top_p=0.9, seed=1, logprobs=1, n=3)
    assert regex.fullmatch("[a-d]{8}", drawn.text)


def test_every_completion_has_a_state_of_its_own(llm):
    (output,) = llm.generate(
        [PROMPT],
        constrained(dataclasses.replace(GREEDY, temperature=3.0, seed=5, n=6), regex="[a-z]{3}-[0-9]{2,5}"),
        use_tqdm=False,
    )
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) > 3 and all(regex.fullmatch("[a-z]{3}-[0-9]{2,5}", text) for text in texts)


def test_it_survives_preemption(base):
    """Pages for less than all of them: some are put back and computed again, in the midst of their answers."""
    params = constrained(dataclasses.replace(GREEDY, max_tokens=100), regex="([a-d]{3}[0-9])+")
    prompts = [[*PROMPT, letter] for letter in b"abcd"]
    found = []
    for pages in (4 * 3, 5):
        with LLM(base.path, precision="fp32", num_kv_pages=pages, **SMALL) as llm:
            found.append([each.outputs[0].text for each in llm.generate(prompts, params, use_tqdm=False)])
            preempted = llm.engine.scheduler.stats().preemptions
    assert preempted > 0 and found[0] == found[1]
    assert all(regex.fullmatch("([a-d]{3}[0-9])+", text[: len(text) // 4 * 4]) for text in found[0])


def test_adapters_and_kinds_in_one_batch(demo):
    """Every constraint with every adapter at once; each answer satisfies its constraint."""
    checks = {
        "json": ({"json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON)),
        "regex": ({"regex": "[a-z]{4,9}!"}, lambda text: regex.compile("[a-z]{4,9}!").fullmatch(text).group()),
        "choice": ({"choice": ["yes", 'no "way"\n', "weiß 😀"]}, ["yes", 'no "way"\n', "weiß 😀"].index),
        "lark": ({"grammar": 'start: "<" WORD ">" \nWORD: /[a-z]{2,5}/'}, lambda text: text.index(">")),
        "gbnf": ({"grammar": 'root ::= "yes" | "no" [a-z]{2,4}'}, lambda text: ["y", "n"].index(text[0])),
        "object": ({"json_object": True, "disable_any_whitespace": True}, None),
    }
    adapters = [None, *demo.adapters]
    asked = [(kind, adapter) for kind in checks for adapter in adapters]
    params = [
        constrained(SamplingParams(temperature=0.8, seed=3, max_tokens=96), **checks[kind][0]) for kind, _ in asked
    ]
    free = SamplingParams(temperature=0, max_tokens=12)
    alone = demo.generate(["What is the capital of France?"], free, use_tqdm=False)
    outputs = demo.generate(
        ["What is the capital of France?"] * (len(asked) + 1),
        [*params, free],
        adapter=[*(adapter for _, adapter in asked), None],
        use_tqdm=False,
    )
    assert outputs[-1].outputs[0].token_ids == alone[0].outputs[0].token_ids
    for (kind, _), output in zip(asked, outputs[:-1], strict=True):
        completion, check = output.outputs[0], checks[kind][1]
        assert completion.text and completion.finish_reason in ("stop", "length"), completion
        if check is not None and completion.finish_reason == "stop":
            check(completion.text)
        assert completion.finish_reason == "stop" or kind == "object", completion


def test_what_cannot_be_is_told(demo):
    for constraint, expected in (
        ({"regex": "(?=a)b"}, "structured_outputs.regex cannot be used: .*look-around"),
        ({"json": {"uniqueItems": True}}, "Unimplemented keys"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar cannot be used"),
    ):
        with pytest.raises(RequestError, match=expected):
            demo.generate("x", constrained(**constraint), use_tqdm=False)


def test_without_the_package_the_error_says_what_to_install(monkeypatch, base):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(base.path, precision="fp32", **SMALL) as llm:
        with pytest.raises(RequestError, match=r"pip install 'sidestream\[structured\]'"):
            llm.generate([PROMPT], constrained(regex="a"), use_tqdm=False)
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
