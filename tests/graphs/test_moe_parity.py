"""Mixtures of experts against transformers: the same logits, whatever the family, the chunks and the checkpoint's
names.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.graphs.moe.sparse_mlp import Router
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import TinyBase, oracle_logits, tiny_model

TOLERANCE = 1e-4
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "qwen3-unnormalized": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3-dense-layers": (
        "Qwen3Moe",
        {"num_experts": 6, "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen3-window": ("Qwen3Moe", {"num_experts": 4, "use_sliding_window": True, "sliding_window": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 80}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24, "head_dim": 128}),
    "granite": (
        "GraniteMoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
}


def sparse(directory: Path, name: str, **options: Any) -> TinyBase:
    """A random model of `SPARSE`. Its router's logits are far apart, so no rounding changes the choice of experts."""
    family, fields = SPARSE[name]
    shared = {"moe_intermediate_size": 32} if family == "Qwen3Moe" else {}
    return tiny_model(directory, family, seed=len(name), **{**shared, "num_experts_per_tok": 2, **fields, **options})


def tokens(count: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(320) for _ in range(count)]


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    base = sparse(tmp_path, "qwen3")
    runner, text = PagedRunner(plain_model(base)[0], 1, padding=2), tokens(11)
    logits, got = runner.step([Chunk(0, text)])[0], []
    for _ in range(64):
        got.append(int(logits[-1].argmax()))
        logits = runner.step([Chunk(0, got[-1:])])[0]
    theirs = oracle_logits(base, None, text + got)[len(text) - 1 : -1]
    assert got == theirs.argmax(-1).tolist(), "each token is the most likely one after those before it"


def test_padding_chooses_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, route = [], Router.route

    def spy(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen.append(route(*args))
        return chosen[-1]

    monkeypatch.setattr(Router, "route", spy)
    PagedRunner(plain_model(sparse(tmp_path, "qwen3-dense-layers"))[0], 1, padding=5).step([Chunk(0, tokens(4))])
    assert len(chosen) == 1, "of four layers, one is sparse"
    experts, weights = chosen[0]
    assert (experts[:4] >= 0).all() and (experts[4:] == -1).all() and (weights[4:] == 0).all()


@pytest.mark.parametrize("name", SPARSE)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Prompts whole and in chunks, decode steps, and padding, mixed in the same steps."""
    base = sparse(tmp_path, name)
    model, _ = plain_model(base)
    texts = [tokens(70, 1), tokens(5, 2), tokens(33, 3)]
    sizes = [[70], [1, 1, 2, 1], [9, 20, 3, 1]]
    runner, done, pieces = PagedRunner(model, 3, padding=3), [0, 0, 0], [[], [], []]
    for step in range(4):
        chunks = []
        for index, text in enumerate(texts):
            if step < len(sizes[index]):
                chunks.append(Chunk(index, text[done[index] : done[index] + sizes[index][step]]))
                done[index] += sizes[index][step]
        for chunk, logits in zip(chunks, runner.step(chunks), strict=True):
            pieces[chunk.sequence].append(logits)
    for text, found in zip(texts, pieces, strict=True):
        torch.testing.assert_close(torch.cat(found), oracle_logits(base, None, text), atol=TOLERANCE, rtol=0)
