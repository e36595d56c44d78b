"""`allowed_token_ids` and `bad_words` of LLM, against the processors of transformers' `generate`."""

import dataclasses

import pytest
import torch
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import TinyBase, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SMALL = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48}
LETTERS = list(b"abcdefgh ")
PROMPT = list(b"To be, or not to be: that is the question")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def llm(base):
    with LLM(base.path, precision="fp32", **SMALL) as llm:
        yield llm


def theirs(base: TinyBase, **processors) -> list[int]:
    """The same by transformers."""
    ids = torch.tensor([PROMPT])
    made = base.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None,
        pad_token_id=0, **processors,
    )  # fmt: skip
    return made[0, len(PROMPT) :].tolist()


def ours(llm: LLM, **fields) -> list[int]:
    (output,) = llm.generate(PROMPT, dataclasses.replace(GREEDY, **fields), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    return output.outputs[0].token_ids


@pytest.mark.parametrize("ahead", [False, True])
def test_words_are_never_generated(llm, base, ahead):
    """Also where steps are planned ahead, as on a GPU: the plan waits for the tokens before."""
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: LETTERS}
    text = bytes(theirs(base, **allowed)).decode()
    words = [text[5:8], text[11:13], text[0]]
    assert all(word.strip() == word for word in words), "the tokens of a word are then its letters"
    expected = theirs(base, bad_words_ids=[list(word.encode()) for word in words], **allowed)
    llm.engine._depth = int(ahead)
    try:
        found = ours(llm, allowed_token_ids=LETTERS, bad_words=words)
    finally:
        llm.engine._depth = 0
    assert found == expected and bytes(found).decode() != text
    assert not any(word in bytes(found).decode() for word in words)


def test_nothing_but_allowed_tokens(llm, base):
    allowed = [7, 200, 31, 299]
    assert ours(llm, allowed_token_ids=allowed) == theirs(base, prefix_allowed_tokens_fn=lambda batch, ids: allowed)
    biased = ours(llm, allowed_token_ids=allowed, logit_bias={31: 100, 5: 100})
    assert biased == [31] * 24
    together = llm.generate(
        [PROMPT] * 3,
        [
            dataclasses.replace(GREEDY, temperature=1.5, seed=1, allowed_token_ids=allowed, logprobs=1),
            GREEDY,
            dataclasses.replace(GREEDY, temperature=1.5, seed=1, allowed_token_ids=[9], top_p=0.5, top_k=3),
        ],
        use_tqdm=False,
    )
    drawn, free, one = (output.outputs[0] for output in together)
    assert set(drawn.token_ids) == set(allowed) and set(one.token_ids) == {9}
    assert free.token_ids == theirs(base)
    assert all(min(found.values(), key=lambda entry: entry.rank).rank == 1 for found in drawn.logprobs)
    assert any(found[token].rank > 9 for token, found in zip(drawn.token_ids, drawn.logprobs, strict=True)), (
        "log-probabilities are those of the raw logits"
    )


def test_a_word_counts_in_the_output_only(llm, base):
    """As in vLLM: what the prompt ends with does not begin a bad word."""
    first, second = theirs(base, prefix_allowed_tokens_fn=lambda batch, ids: LETTERS)[:2]
    word = bytes([first, second]).decode()
    (output,) = llm.generate(
        [*PROMPT, first],
        dataclasses.replace(GREEDY, max_tokens=1, allowed_token_ids=LETTERS, bad_words=[word]),
        use_tqdm=False,
    )
    assert output.outputs[0].token_ids == [second]


def test_what_cannot_be_is_told(llm):
    for fields, said in (
        ({"allowed_token_ids": [320]}, "allowed_token_ids names token 320, which is outside the model's vocabulary"),
        ({"bad_words": ["</s>x" * 1000]}, "characters in all"),
    ):
        with pytest.raises(RequestError, match=said):
            ours(llm, **fields)
    outputs = llm.generate(
        ["x", "x"],
        [dataclasses.replace(GREEDY, allowed_token_ids=list(b"ab"), bad_words=["a", "ab", "b"]), GREEDY],
        use_tqdm=False,
    )
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "no token is left to sample" in str(outputs[0].outputs[0].stop_reason)
    (output,) = llm.generate(
        "x", dataclasses.replace(GREEDY, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3), use_tqdm=False
    )
    assert "min_tokens forbids" in str(output.outputs[0].stop_reason) and output.outputs[0].token_ids == []
