"""Beam search finds the sequences and scores that transformers' `generate(num_beams=...)` finds, with adapters too."""

import math
import random
from itertools import product
from typing import Any

import pytest
import torch
from sidestream import LLM, BeamSearchParams, LoRARequest, RequestError, SamplingParams
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.outputs import CompletionOutput, Logprob, RequestOutput
from sidestream.runtime.api.request import Request
from sidestream.runtime.demo_model import DEMO_MODEL, demo_adapters
from sidestream.runtime.engine.beam_search import beam_search
from support.beams import transformers_beams

PROMPTS = ["What is the colour of the sky?", "The cat"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", show_progress=False, max_model_len=256, max_num_batched_tokens=256, precision="fp32")


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pirate() -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return PeftModel.from_pretrained(model, demo_adapters()["pirate"]).eval()


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("adapter", [None, "pirate"])
def test_beams_are_those_of_transformers_and_peft(
    llm: LLM, oracle: Any, pirate: Any, adapter: str | None, ignore_eos: bool
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=ignore_eos, length_penalty=0.0)
    outputs = llm.beam_search(PROMPTS, params, adapter)
    stopped = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        eos = None if ignore_eos else sorted(llm.engine.eos_ids)
        want = transformers_beams(pirate if adapter else oracle, ids, 4, 20, eos)
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in want]
        for sequence, (tokens, score) in zip(output.sequences, want, strict=True):
            assert sequence.cum_logprob == pytest.approx(score, abs=2e-3)
            ended = eos is not None and tokens[-1] in eos
            assert (sequence.finish_reason, sequence.stop_reason) == (
                ("stop", tokens[-1]) if ended else ("length", None)
            )
            assert len(sequence.logprobs) == len(tokens) - len(ids)
            chosen = zip(tokens[len(ids) :], sequence.logprobs, strict=True)
            assert sequence.cum_logprob == pytest.approx(sum(entry[token].logprob for token, entry in chosen))
            assert sequence.text == llm.get_tokenizer().decode(tokens) and sequence.text.startswith(prompt)
            stopped += ended
    assert ignore_eos or stopped >= 4


def test_one_beam_is_the_greedy_answer(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), "yoda", use_tqdm=False)
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 12), lora_request=LoRARequest("yoda", 1))
    for output, answer in zip(outputs, greedy, strict=True):
        (sequence,) = output.sequences
        assert sequence.tokens == answer.prompt_token_ids + answer.outputs[0].token_ids
        assert sequence.lora_request == LoRARequest("yoda", 1)


def test_prompts_may_be_searched_a_few_at_a_time_and_share_their_beginnings(llm: LLM) -> None:
    long = [PROMPTS[0] * 9, "The dog"]
    params = BeamSearchParams(3, 4)
    assert llm.reset_prefix_cache()
    hits = llm.engine.scheduler.stats().prefix_hits
    together = llm.beam_search(long, params, [None, "json"])
    # at the first of four steps nothing is known
    assert llm.engine.scheduler.stats().prefix_hits - hits == 3 * params.beam_width * PAGE_SIZE
    alone = llm.beam_search(long, params, [None, "json"], concurrency_limit=1)
    assert [[s.tokens for s in output.sequences] for output in together] == [
        [s.tokens for s in output.sequences] for output in alone
    ]


EOS, WORDS = 0, (1, 2)


def probabilities(source: random.Random, tokens: tuple[int, ...]) -> dict[int, float]:
    """Of the next token after `tokens`; the same at every call."""
    source.seed(str(tokens) + str(source.name))  # type: ignore[attr-defined]
    weights = [source.random() for _ in (EOS, *WORDS)]
    return {token: weight / sum(weights) for token, weight in zip((EOS, *WORDS), weights, strict=True)}


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 3.0])
def test_a_beam_as_wide_as_all_that_can_be_said_finds_the_best(penalty: float) -> None:
    """Against all answers, one by one: two words and an end of sequence, three steps."""
    for name in range(20):
        source = random.Random()
        source.name = name  # type: ignore[attr-defined]
        prompt, every = [1, 2, 1], []
        answers = [(*words, EOS) for length in range(3) for words in product(WORDS, repeat=length)]
        for answer in [*answers, *product(WORDS, repeat=3)]:
            total = sum(
                math.log(probabilities(source, (*prompt, *answer[:place]))[token]) for place, token in enumerate(answer)
            )
            every.append((total / len(answer) ** penalty, [*prompt, *answer]))

        def generate(prompts: list[list[int]], sampling: SamplingParams, origins: list[Request]) -> Any:
            assert [origin.adapter for origin in origins] == ["a"] * len(prompts) and sampling.max_tokens == 1
            rows = [probabilities(source, tuple(ids)) for ids in prompts]  # noqa: B023
            found = [{token: Logprob(math.log(value), 1) for token, value in row.items()} for row in rows]
            return [
                RequestOutput("", None, ids, [CompletionOutput(0, logprobs=[entry])], True)
                for ids, entry in zip(prompts, found, strict=True)
            ]

        params = BeamSearchParams(8, 3, length_penalty=penalty)
        request = Request("0", None, prompt, params.sampling, "a")
        (output,) = beam_search([request], params, frozenset({EOS}), None, generate)
        best = sorted(every, reverse=True)[:8]
        assert [sequence.tokens for sequence in output.sequences] == [tokens for _, tokens in best]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 11}, "beam_width=11 must be an integer from 1 to 10"),
        ({"beam_width": True}, "beam_width=True must be"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
    ],
)
def test_parameters_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **arguments})
    assert message in str(caught.value)


def test_searches_that_cannot_be_served(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must be BeamSearchParams, not SamplingParams"):
        llm.beam_search("x", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="max_tokens=255 exceed max_model_len=256; lower max_tokens"):
        llm.beam_search("The cat", BeamSearchParams(2, 255))
    with pytest.raises(RequestError, match="adapter 'nobody' is not known"):
        llm.beam_search("The cat", BeamSearchParams(2, 3), "nobody")
    with pytest.raises(RequestError, match="concurrency_limit=0"):
        llm.beam_search("The cat", BeamSearchParams(2, 3), concurrency_limit=0)
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []
