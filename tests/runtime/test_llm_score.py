"""`LLM.score` on a CPU: the log-probabilities of a rollout, to the bit, however both were computed."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sidestream import LLM, LoRARequest, RequestError, SamplingParams, ScoreOutput
from sidestream.tools.bench.random_model import TINY, write_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama

ROLLOUT = SamplingParams(temperature=1.0, max_tokens=40, logprobs=0, seed=11)
MAX_LEN = 160
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "device": "cpu", "max_model_len": MAX_LEN, "max_loras": 2, "show_progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_model(tmp_path_factory.mktemp("adapters"), TINY, 2, 8)


def random_ids(source: random.Random, length: int) -> list[int]:
    return [source.randrange(512) for _ in range(length)]


def prompts_and_adapters(adapters: dict[str, Path], count: int, seed: int) -> tuple[list[list[int]], list[str | None]]:
    """Prompts that begin alike, among others; each of the adapters and the base answers some."""
    source = random.Random(seed)
    beginning = random_ids(source, 67)
    prompts = [(beginning if index % 2 else []) + random_ids(source, source.randrange(1, 60)) for index in range(count)]
    return prompts, [[None, *adapters][index % 3] for index in range(count)]


def rollout(llm: LLM, prompts: Any, adapter: Any, params: Any = ROLLOUT) -> tuple[list[list[int]], list[np.ndarray]]:
    """Answers, and the log-probabilities [n] fp32 that came with them."""
    completions = [output.outputs[0] for output in llm.generate(prompts, params, adapter, use_tqdm=False)]
    logprobs = [[next(iter(entry.values())).logprob for entry in each.logprobs or ()] for each in completions]
    return [each.token_ids for each in completions], [np.array(values, np.float32) for values in logprobs]


def assert_same_bits(scores: list[ScoreOutput], expected: list[np.ndarray]) -> None:
    assert len(scores) == len(expected)
    for score, values in zip(scores, expected, strict=True):
        assert score.logprobs.dtype == np.float32 and score.logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
def test_scores_are_the_log_probabilities_of_the_rollout(adapters, precision):
    """From an engine that drafts, caches and decodes many at once; by engines with other chunks, few pages, no cache,
    one sequence at a time, and by the engine itself.
    """
    prompts, chosen = prompts_and_adapters(adapters, 7, seed=3)
    params = [dataclasses.replace(ROLLOUT, seed=index) for index in range(len(prompts))]
    # an answer of one token, and one that ends with the last token that the model can have
    params[0] = dataclasses.replace(ROLLOUT, max_tokens=1)
    params[1] = dataclasses.replace(ROLLOUT, max_tokens=None, ignore_eos=True)
    engine = LLM(TINY, adapters, precision=precision, speculation=3, max_num_seqs=7, **OPTIONS)
    responses, expected = rollout(engine, prompts, chosen, params)
    assert len(responses[0]) == 1 and len(prompts[1]) + len(responses[1]) == MAX_LEN
    assert_same_bits(engine.score(prompts, responses, chosen), expected)
    alone = LLM(
        TINY, adapters, precision=precision, max_num_seqs=1, max_num_batched_tokens=33, enable_prefix_caching=False,
        **OPTIONS,
    )  # fmt: skip
    assert_same_bits(alone.score(prompts[:4], responses[:4], chosen[:4]), expected[:4])
    preempted = LLM(TINY, adapters, precision=precision, max_num_seqs=4, max_num_batched_tokens=30, **OPTIONS)
    scheduler, step = preempted.engine.scheduler, preempted.engine.step

    def step_after_preemption() -> Any:
        for sequence in list(scheduler.states.running):
            if sequence.scored and sequence.scores_prompt and not sequence.preemptions:  # in the middle of a response
                scheduler.preemption.preempt(sequence)
        return step()

    preempted.engine.step = step_after_preemption
    assert_same_bits(preempted.score(prompts, responses, chosen), expected)
    assert scheduler.states.preemptions > 3


def test_the_given_part_comes_from_the_cache_and_costs_no_logits(adapters):
    llm = LLM(TINY, adapters, precision="fp32", **OPTIONS)
    source = random.Random(1)
    prompt, response = random_ids(source, 139), random_ids(source, 20)
    plans = []
    submit = llm.engine.runner.submit
    llm.engine.runner.submit = lambda plan: plans.append(plan) or submit(plan)
    (first,), (second,) = llm.score([prompt], [response]), llm.score([prompt], [response])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert first.logprobs.tobytes() == second.logprobs.tobytes()
    assert [plan.num_tokens for plan in plans] == [158, 158 - 128]
    assert [len(plan.logits_indices) for plan in plans] == [20, 20]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def tiny(base: TinyBase) -> Any:
    activated = {"alora_invocation_tokens": [7, 8, 9]}
    plain, alora = tiny_adapters(base, [AdapterSpec(rank=8), AdapterSpec(rank=4, extra=activated)])
    options = {name: value for name, value in OPTIONS.items() if name != "load_format"}
    with LLM(base.path, {"plain": plain, "alora": alora}, precision="fp32", **options) as llm:
        yield llm, plain


def test_scores_are_those_of_transformers_and_peft(tiny, base):
    llm, adapter = tiny
    source = random.Random(2)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (1, 40, 100)]
    responses = [[source.randrange(256) for _ in range(length)] for length in (30, 1, 60)]
    for name, directory in ((None, None), ("plain", adapter)):
        for prompt, response, score in zip(prompts, responses, llm.score(prompts, responses, name, top=3), strict=True):
            rows = oracle_logits(base, directory, prompt + response).log_softmax(-1)[len(prompt) - 1 : -1]
            expected = rows.gather(1, torch.tensor(response)[:, None])[:, 0]
            torch.testing.assert_close(torch.from_numpy(score.logprobs), expected, atol=1e-3, rtol=0)
            likeliest = rows.topk(3)
            assert score.top_token_ids.tolist() == likeliest.indices.tolist() and score.top_token_ids.dtype == np.int32
            torch.testing.assert_close(torch.from_numpy(score.top_logprobs), likeliest.values, atol=1e-3, rtol=0)


def test_texts_are_scored_as_their_tokens(tiny):
    llm, _ = tiny
    tokens = llm.get_tokenizer().encode("To be")
    (expected,) = llm.score([tokens], [list(b" or not")])
    assert_same_bits(llm.score("To be", " or not"), [expected.logprobs])
    assert_same_bits(llm.score(torch.tensor(tokens), {"prompt_token_ids": list(b" or not")}), [expected.logprobs])


def test_an_answer_with_the_invocation_keeps_the_activation_of_its_prompt(tiny):
    llm, _ = tiny
    given = [50, 60, 7, 8, 9, 70]
    for prompt, is_active in ((given, True), ([50, 60], False)):
        responses, expected = rollout(llm, [prompt], "alora")
        assert_same_bits(llm.score([prompt], responses, "alora"), expected)
        base_model, adapted = llm.score([prompt] * 2, [[1, 7, 8, 9, 2, 3]] * 2, [None, "alora"])
        assert adapted.adapter_active == is_active
        assert np.array_equal(adapted.logprobs, base_model.logprobs) != is_active


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1]], [[2], [3]]), "responses has 2 entries for 1 prompts; give one per prompt"),
        (([[1], []], [[2], [3]]), "prompt 1: the prompt is empty"),
        (([[1]], [[]]), "response 0: the response is empty"),
        (([[1], [1]], [[2], [512]]), "pair 1: token id 512 is out of vocabulary: the model has 512 tokens"),
        (([[1]], [[-1]]), "token id -1 is out of vocabulary"),
        (([[1]], [[2] * MAX_LEN]), f"the sequence has {MAX_LEN + 1} tokens, more than max_model_len={MAX_LEN}"),
        (([[1]], 5), "responses must be text, token ids or a list of these, not int"),
        (([[1]], [[2.5]]), "response 0: a response is text or a list of token ids; this list holds a float"),
        (([[1]], ["text"]), "response 0: text needs a tokenizer"),
        (([[1]], [[2]], "gone"), "adapter 'gone' is not known"),
        (([[1]], [[2]], [None, None]), "adapter has 2 entries for 1 prompts"),
        (([[1]], [[2]], None, 21), "top=21 must be an integer from 0 to 20"),
        (([[1]], [[2]], None, True), "top=True must be an integer"),
    ],
)
def test_a_wrong_pair_is_refused_and_nothing_runs(llm, arguments, words):
    with pytest.raises(RequestError) as caught:
        llm.score(*arguments)
    assert words in str(caught.value)
    assert not llm.engine.has_work and len(llm.score([[1]], [[2]])[0].logprobs) == 1


@pytest.fixture(scope="module")
def llm(adapters: dict[str, Path]) -> Any:
    with LLM(TINY, adapters, precision="fp32", **OPTIONS) as llm:
        yield llm


def test_none_are_scored_in_no_step_and_requests_of_adapters_are_resolved(llm, adapters):
    assert llm.score([], []) == []
    name, directory = next(iter(adapters.items()))
    (named,) = llm.score([[1, 2]], [[3, 4]], name)
    (requested,) = llm.score([[1, 2]], [[3, 4]], lora_request=LoRARequest(name, 1, str(directory)))
    assert named.logprobs.tobytes() == requested.logprobs.tobytes()


def test_values_that_are_not_finite_end_in_an_error(llm, monkeypatch):
    from sidestream.runtime.worker import sampler

    monkeypatch.setattr(sampler, "argmax", lambda scores, *masked: torch.full((len(scores),), -1, dtype=torch.int32))
    with pytest.raises(RequestError, match="not finite"):
        llm.score([[1, 2]], [[3, 4]])
