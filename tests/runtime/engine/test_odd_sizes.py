"""Vocabularies and heads of any size are served in eight bits: Granite has 49,155 tokens, an Alpaca 32,001, Phi-3 mini
heads of 96 dimensions, and Phi-4-mini turns three quarters of a head.
"""

import random
from pathlib import Path

import pytest
import sidestream
import torch
from sidestream import SamplingParams
from support.families import tiny_family
from support.tiny import AdapterSpec, oracle_logits, tiny_adapters

VOCABULARY = 323


@pytest.mark.parametrize(
    ("family", "precision"),
    [("granite", "int8"), ("llama-narrow", "fp8"), ("phi3-narrow", "int8"), ("phi3-partial", "int8")],
)
def test_log_probabilities_are_those_of_transformers(family: str, precision: str, tmp_path: Path) -> None:
    source = random.Random(5)
    base = tiny_family(tmp_path / "base", family, source, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    packed = family.startswith("phi3")
    targets = ("qkv_proj", "o_proj", "down_proj") if packed else ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
    (adapter,) = tiny_adapters(base, [AdapterSpec(rank=8, targets=targets)])
    llm = sidestream.LLM(
        str(base.path),
        {"tuned": str(adapter)},
        precision=precision,
        device="cpu",
        max_model_len=128,
        show_progress=False,
    )
    prompt = [source.randrange(VOCABULARY) for _ in range(40)] + [VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    for name, path in ((None, None), ("tuned", adapter)):
        (output,) = llm.generate([prompt], params, adapter=name, use_tqdm=False)
        answer = output.outputs[0]
        tokens = prompt + list(answer.token_ids)
        expected = torch.log_softmax(oracle_logits(base, path, tokens), -1)
        assert output.prompt_logprobs is not None and answer.logprobs is not None
        found = [*output.prompt_logprobs[1:], *answer.logprobs]
        differences = [
            abs(each[token].logprob - expected[index, token].item())
            for index, (token, each) in enumerate(zip(tokens[1:], found, strict=True))
        ]
        spread = expected.std(-1).mean().item()  # of a token's log-probabilities: what a wrong column would be off by
        assert sum(differences) / len(differences) < 0.25 * spread


@pytest.mark.parametrize("family", ["phi3-narrow", "phi3-partial"])
def test_longrope_has_the_frequencies_of_the_longest_context(family: str, tmp_path: Path) -> None:
    """transformers takes those of the text at hand: the same where a text is longer than the original contexts, and
    where no context may be.
    """
    source = random.Random(6)
    base = tiny_family(tmp_path / "base", family, source)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    found = {}
    for longest, length in ((None, 200), (512, 300), (512, 200)):  # the original contexts have 256
        prompt = [source.randrange(320) for _ in range(length)]
        llm = sidestream.LLM(
            str(base.path), precision="fp32", device="cpu", max_model_len=longest, max_num_seqs=1, show_progress=False
        )
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        expected = torch.log_softmax(oracle_logits(base, None, prompt), -1)
        assert output.prompt_logprobs is not None
        found[longest, length] = max(
            abs(each[token].logprob - expected[index, token].item())
            for index, (token, each) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True))
        )
    assert found[None, 200] < 1e-4 and found[512, 300] < 1e-4 < found[512, 200]
