"""`prompt_logprobs` of LLM, against the log-softmax of transformers and peft in fp32."""

import dataclasses

import pytest
import torch
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, oracle_logits, tiny_adapters, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SMALL = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def adapter(base):
    return tiny_adapters(base, [AdapterSpec(rank=8)])[0]


@pytest.fixture(scope="module")
def llm(base, adapter):
    with LLM(base.path, {"first": adapter}, precision="fp32", **SMALL) as llm:
        yield llm


def ids(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def check(found, prompt, count, base, adapter):
    assert found is not None and len(found) == len(prompt) and found[0] is None
    expected = oracle_logits(base, adapter, prompt).log_softmax(-1)
    for token, row, entry in zip(prompt[1:], expected, found[1:], strict=False):
        assert next(iter(entry)) == token
        assert set(entry) == {token, *row.topk(count).indices.tolist()}
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[other]), abs=1e-3)
            assert logprob.rank == int((row > row[other]).sum()) + 1


@pytest.mark.parametrize("ahead", [False, True])
def test_they_are_those_of_transformers_and_peft(llm, base, adapter, ahead):
    """Prompts longer than a step, of which the cache has a part, next to requests that ask for none."""
    prompts = [ids(130), ids(1), ids(70), ids(130), ids(70), ids(2)]
    counts = [3, 0, None, 0, 20, 1]
    chosen = [None, "first", "first", "first", "first", None]
    params = [dataclasses.replace(GREEDY, prompt_logprobs=count) for count in counts]
    llm.generate(prompts, GREEDY, chosen, use_tqdm=False)  # now the cache has them
    llm.engine._depth = int(ahead)
    try:
        outputs = llm.generate(prompts, params, chosen, use_tqdm=False)
    finally:
        llm.engine._depth = 0
    plain = llm.generate(prompts, GREEDY, chosen, use_tqdm=False)
    for prompt, count, name, output, other in zip(prompts, counts, chosen, outputs, plain, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids and other.prompt_logprobs is None
        if count is None:
            assert output.prompt_logprobs is None
        else:
            assert output.num_cached_tokens == 0
            check(output.prompt_logprobs, prompt, count, base, adapter if name else None)


def test_texts_and_several_completions(llm, base):
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=1, n=2, temperature=1.0, seed=1)
    (output,) = llm.generate("To be", params, use_tqdm=False)
    check(output.prompt_logprobs, list(b"To be"), 2, base, None)
    assert [next(iter(entry.values())).decoded_token for entry in output.prompt_logprobs[1:]] == list("o be")
    assert [len(completion.logprobs) for completion in output.outputs] == [4, 4]
    (silent,) = llm.generate("To be", dataclasses.replace(params, detokenize=False), use_tqdm=False)
    assert all(entry.decoded_token is None for place in silent.prompt_logprobs[1:] for entry in place.values())


def test_a_stream_has_them_before_its_first_token(llm, base):
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=1)
    prompt = ids(100)
    chunks = list(llm.stream(prompt, params))
    scored = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    assert chunks[: len(scored)] == scored and len(scored) > 1 and not any(chunk.token_ids for chunk in scored)
    check([None, *(entry for chunk in scored for entry in chunk.prompt_logprobs)], prompt, 2, base, None)
    assert [next(iter(chunk.logprobs)) for chunk in chunks[len(scored) :]] == [
        chunk.token_ids[0] for chunk in chunks[len(scored) :]
    ]


def test_minus_one_is_the_whole_vocabulary(base):
    """Up to the option max_logprobs, which also limits the other numbers."""
    whole = dataclasses.replace(GREEDY, logprobs=-1, prompt_logprobs=-1)
    prompt = ids(20)
    with LLM(base.path, precision="fp32", max_logprobs=-1, **SMALL) as llm:
        (output,) = llm.generate([prompt], whole, use_tqdm=False)
    check(output.prompt_logprobs, prompt, 320, base, None)
    (completion,) = output.outputs
    expected = oracle_logits(base, None, prompt + completion.token_ids[:-1]).log_softmax(-1)[len(prompt) - 1 :]
    for token, row, entry in zip(completion.token_ids, expected, completion.logprobs, strict=True):
        assert next(iter(entry)) == token and len(entry) == 320
        assert [entry[each].logprob for each in range(320)] == pytest.approx(row.tolist(), abs=1e-3)


def test_the_engine_limits_log_probabilities(llm, base):
    for params, words in (
        (dataclasses.replace(GREEDY, logprobs=21), "logprobs=21 is more than max_logprobs=20"),
        (dataclasses.replace(GREEDY, prompt_logprobs=-1), "prompt_logprobs=-1, the vocabulary of 320 tokens, is more"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate([[1, 2]], params, use_tqdm=False)
    with pytest.raises(RequestError, match="top=21 must be an integer from 0 to 20"):
        llm.score([[1]], [[2]], top=21)


def test_processed_log_probabilities(base):
    """As in vLLM: of sampled tokens after bias and temperature; those of the prompt are the model's. No scores."""
    params = SamplingParams(temperature=0.5, max_tokens=3, logit_bias={7: 3.0}, seed=1, logprobs=2, prompt_logprobs=1)
    prompt = ids(20)
    with LLM(base.path, precision="fp32", logprobs_mode="processed_logprobs", **SMALL) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        with pytest.raises(RequestError, match="scores are of the raw logits, but this engine has processed_logprobs"):
            llm.score([prompt], [[1]])
    check(output.prompt_logprobs, prompt, 1, base, None)
    (completion,) = output.outputs
    logits = oracle_logits(base, None, prompt + completion.token_ids[:-1])[len(prompt) - 1 :]
    logits[:, 7] += 3.0
    for row, entry in zip((logits / 0.5).log_softmax(-1), completion.logprobs, strict=True):
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[token]), abs=2e-3)
