"""Vocabularies of any size are served in eight bits: Granite has 49,155 tokens, an Alpaca 32,001."""

import random
from pathlib import Path

import pytest
import sidestream
import torch
from sidestream import SamplingParams
from support.tiny import AdapterSpec, oracle_logits, tiny_adapters, tiny_model

VOCABULARY = 323


@pytest.mark.parametrize(("family", "precision"), [("Granite", "int8"), ("Llama", "int8"), ("Llama", "fp8")])
def test_log_probabilities_are_those_of_transformers(family: str, precision: str, tmp_path: Path) -> None:
    source = random.Random(5)
    base = tiny_model(tmp_path / "base", family, vocab_size=VOCABULARY, tie_word_embeddings=family == "Granite")
    (adapter,) = tiny_adapters(base, [AdapterSpec(rank=8)])
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
