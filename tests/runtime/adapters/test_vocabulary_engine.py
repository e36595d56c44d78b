"""Engines with adapters that change the embedding or the output head, next to others in one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream import LLM, SamplingParams
from sidestream.graphs.adapter_config import AdapterError
from sidestream.runtime.api.errors import RequestError
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_model
from support.vocabulary import KINDS, trained

TOKENS = [5, 200, 17, 7, 17, 90, 3, 301, 44, 9, 2]
NAMES = ("both", "tokens", "both saved")
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_kv_pages": 8, "max_loras": 3}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}


def adapters(base: TinyBase, place: Path) -> dict[str, Path]:
    paths = {name.replace(" ", "-"): trained(base, place / name, **KINDS[name]) for name in NAMES}
    return paths | {"plain": tiny_adapters(base, [AdapterSpec(rank=8)])[0]}


def scores(llm: LLM, names: list[str | None]) -> list[tuple[list[int], list[float]]]:
    """The answer and the prompt's log-probabilities for each adapter, all in one batch."""
    outputs = llm.generate([TOKENS] * len(names), SCORED, adapter=names, use_tqdm=False)
    return [
        (output.outputs[0].token_ids, [output.prompt_logprobs[i][TOKENS[i]].logprob for i in range(1, len(TOKENS))])
        for output in outputs
    ]


def expected(base: TinyBase, adapter: Path | None, answer: list[int]) -> tuple[list[int], torch.Tensor]:
    """The greedy answer, and the log-probabilities of the prompt's tokens."""
    wanted = torch.log_softmax(oracle_logits(base, adapter, [*TOKENS, *answer]), -1)
    places = torch.arange(len(TOKENS) - 1)
    return wanted[len(TOKENS) - 1 : -1].argmax(-1).tolist(), wanted[places, torch.tensor(TOKENS[1:])]


@pytest.mark.parametrize(
    ("family", "tied", "ranks", "precision"),
    [
        ("Llama", False, 1, "fp32"),
        ("Llama", True, 1, "fp32"),
        ("Llama", False, 2, "fp32"),
        ("Granite", True, 1, "fp32"),
        ("Llama", True, 1, "int8"),
        ("Granite", False, 2, "int8"),
    ],
)
def test_mixed_batches_equal_peft(tmp_path: Path, family: str, tied: bool, ranks: int, precision: str) -> None:
    options = GRANITE if family == "Granite" else {}
    base = tiny_model(tmp_path, family, tie_word_embeddings=tied, **options)
    paths = adapters(base, tmp_path)
    names = [*paths, None]
    with LLM(base.path, paths, precision=precision, tensor_parallel_size=ranks, show_progress=False, **SIZES) as llm:
        found = scores(llm, names)
    for name, (answer, logprobs) in zip(names, found, strict=True):
        wanted, reference = expected(base, paths.get(name or ""), answer)
        error = (torch.tensor(logprobs) - reference).abs()
        if precision == "fp32":
            assert answer == wanted and error.max() < 1e-4, name
        else:  # logits of up to 20, whose ranks have eight bits
            assert error.max() < 1.0 and error.mean() < 0.3, name


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_others_get_the_bits_of_an_engine_without(tmp_path: Path, precision: str) -> None:
    base = tiny_model(tmp_path, "Llama", num_hidden_layers=1)
    paths = adapters(base, tmp_path)
    with LLM(base.path, paths, precision=precision, show_progress=False, **SIZES) as llm:
        mixed = scores(llm, ["plain", None, "both", "tokens"])
        alone = scores(llm, ["plain", None])
    with LLM(
        base.path, {"plain": paths["plain"]}, precision=precision, max_lora_rank=16, show_progress=False, **SIZES
    ) as llm:
        assert scores(llm, ["plain", None]) == alone
        assert scores(llm, ["plain", None, "plain", None])[:2] == mixed[:2]
        with pytest.raises(RequestError, match=r"on q_proj, embed_tokens, lm_head does not fit .*lora_target_modules"):
            llm.add_adapter("both", paths["both"])


def test_adapters_that_are_loaded_later(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Llama", num_hidden_layers=1)
    path = trained(base, tmp_path / "a", **KINDS["tokens of both"])
    room: dict[str, Any] = {"lora_target_modules": ["all", "embed_tokens", "lm_head"], "max_lora_rank": 16}
    with LLM(base.path, precision="fp32", show_progress=False, **SIZES, **room) as llm:
        llm.add_adapter("late", path)
        ((answer, logprobs),) = scores(llm, ["late"])
    wanted, reference = expected(base, path, answer)
    assert answer == wanted
    torch.testing.assert_close(torch.tensor(logprobs), reference, atol=1e-4, rtol=0)


def test_random_weights_have_no_embedding_to_compare_with(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Llama", num_hidden_layers=1)
    path = trained(base, tmp_path / "a", **KINDS["tokens"])
    with pytest.raises(AdapterError, match=r"adapter 'a': .*random weights \(load_format='dummy'\)"):
        LLM(base.path, {"a": path}, precision="fp32", load_format="dummy", show_progress=False, **SIZES)
