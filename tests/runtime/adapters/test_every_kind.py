"""All kinds of adapters, a sum and the base model in one batch: each answers as it does alone, and as PEFT's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream import LLM, SamplingParams
from support.tiny import AdapterSpec, oracle_logits, tiny_adapters, tiny_model
from support.vocabulary import KINDS, trained

PROMPT = [5, 200, 17, 7, 17, 90, 3, 301, 44, 9, 2]
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
SPECS = {
    "lora": AdapterSpec(rank=8),
    "high": AdapterSpec(rank=40, targets=("v_proj", "down_proj")),
    "dora": AdapterSpec(rank=4, extra={"use_dora": True}),
    "biased": AdapterSpec(rank=4, targets=("q_proj", "o_proj"), extra={"bias": "all"}),
    "b_biased": AdapterSpec(rank=4, targets=("q_proj", "down_proj"), extra={"lora_bias": True}),
    "activated": AdapterSpec(rank=8, extra={"alora_invocation_tokens": [90, 3]}),
}
SUM = {"lora": 0.7, "high": -0.4}
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 12, "num_kv_pages": 16, "max_loras": 10}


def scores(llm: LLM, names: list[Any]) -> list[tuple[list[int], torch.Tensor]]:
    """The answer and the prompt's log-probabilities for each adapter, all in one batch."""
    outputs = llm.generate([PROMPT] * len(names), SCORED, adapter=names, use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            torch.tensor([output.prompt_logprobs[place][PROMPT[place]].logprob for place in range(1, len(PROMPT))]),
        )
        for output in outputs
    ]


@pytest.mark.parametrize("family", ["Qwen2", "Granite"])
def test_all_kinds_in_one_batch(tmp_path: Path, family: str) -> None:
    base = tiny_model(tmp_path, family, num_hidden_layers=1, tie_word_embeddings=family == "Qwen2", attention_bias=True)
    paths = dict(zip(SPECS, tiny_adapters(base, list(SPECS.values())), strict=True))
    for kind in ("both", "tokens", "both saved"):
        paths[kind.replace(" ", "_")] = trained(base, tmp_path / kind, **KINDS[kind])
    names: list[Any] = [*paths, SUM, None]
    with LLM(base.path, paths, precision="fp32", max_lora_rank=64, show_progress=False, **SIZES) as llm:
        together = scores(llm, names)
        alone = [scores(llm, [name])[0] for name in names]
    assert len({tuple(tokens) for tokens, _ in together}) > len(names) // 2, "the adapters differ"
    for name, (tokens, logprobs), (other_tokens, other_logprobs) in zip(names, together, alone, strict=True):
        assert tokens == other_tokens and (logprobs - other_logprobs).abs().max() < 1e-4, name
        if name is None or (isinstance(name, str) and name != "activated"):  # tests of their own have PEFT's values
            wanted = torch.log_softmax(oracle_logits(base, paths.get(name or ""), [*PROMPT, *tokens]), -1)
            places = torch.arange(len(PROMPT) - 1)
            assert tokens == wanted[len(PROMPT) - 1 : -1].argmax(-1).tolist(), name
            assert (logprobs - wanted[places, torch.tensor(PROMPT[1:])]).abs().max() < 1e-4, name
