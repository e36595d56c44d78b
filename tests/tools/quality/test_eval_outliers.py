"""Injected outliers: the model stays what it was, bit for bit, and its keys and activations get massive channels."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.tokenizer import load_tokenizer
from sidestream.runtime.worker.calibrate.reader import Document, Scorer, plan, step_sizes
from sidestream.tools.quality.arms import BY_NAME, open_arm
from sidestream.tools.quality.outliers import BIAS_POWER, QK_POWER, inject, observe, rescalings

TEXTS = [
    "What is the capital of France? The capital of France is Paris.",
    "Tell me the sum of 3 and 4.",
    "Count from 1 to 7.",
]
ADAPTERS = {name: DEMO_MODEL / "adapters" / name for name in ("pirate", "yoda")}


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    tokenizer = load_tokenizer(DEMO_MODEL)
    assert tokenizer is not None
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def injected(tokens: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    return inject(DEMO_MODEL, ADAPTERS, tmp_path_factory.mktemp("injected"), tokens)


def test_the_injected_bf16_model_gives_the_same_bits(
    injected: tuple[Path, dict[str, Path]], tokens: list[list[int]]
) -> None:
    documents = [Document(text, adapter) for adapter in (None, *ADAPTERS) for text in tokens]
    sizes = step_sizes(LlamaConfig.from_directory(DEMO_MODEL).vocab_size, 64, True)
    logits = []
    for directory, adapters in ((DEMO_MODEL, ADAPTERS), injected):
        scorer = Scorer(
            open_arm(BY_NAME["bf16"], directory, adapters, device="cpu", num_kv_pages=sizes[2], max_model_len=64).model,
            *sizes,
        )
        logits.append(
            [
                scorer.logits(step, documents).clone()
                for step in plan([len(each.tokens) for each in documents], *sizes[:3])
            ]
        )
    assert all(torch.equal(clean, other) for clean, other in zip(*logits, strict=True))
    # adapters do answer in their own way
    assert not torch.equal(logits[0][0][: len(tokens[0])], logits[0][0][-len(tokens[0]) :])


def test_outliers_are_as_large_as_the_powers_say(
    injected: tuple[Path, dict[str, Path]], tokens: list[list[int]]
) -> None:
    config = LlamaConfig.from_directory(DEMO_MODEL)
    half = config.head_dim // 2
    clean, other = (load_file(directory / "model.safetensors") for directory in (DEMO_MODEL, injected[0]))
    name = "model.layers.1.self_attn.{}_proj.weight"
    k, q = (other[name.format(each)].float() / clean[name.format(each)].float() for each in "kq")
    assert k[half - 1].nanmean() == 2.0**QK_POWER and k[half - 2].nanmean() == 2.0**-QK_POWER
    assert q[half - 1].nanmean() == 2.0**-QK_POWER and q[half - 2].nanmean() == 2.0**QK_POWER
    observed, before = observe(injected[0], tokens), observe(DEMO_MODEL, tokens)
    change = next(change for change in rescalings(config, before) if change.projection == "mlp.up_proj")
    layer, channel = change.layer, change.places[0]
    assert torch.equal(observed.bias[0], before.bias[0])  # a bias grows with its channel, in proportion
    up = f"model.layers.{layer}.mlp.up_proj.weight"
    assert torch.equal(other[up][channel].float(), clean[up][channel].float() * 2.0**change.power)
    assert 0.5 <= observed.room[layer][channel] < 2 < before.room[layer][channel], (
        "massive at the first token, of the usual size of a largest value elsewhere"
    )
    assert BIAS_POWER > 0
