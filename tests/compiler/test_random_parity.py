"""Random tiny models through the whole pipeline against transformers and peft: prefill in chunks and decode steps, 0
to 5 adapters in one batch.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.options import CompileOptions
from support.compiled import CompiledRunner
from support.paged import Chunk, plain_model
from support.tiny import LINEAR_ROPE, LLAMA3_ROPE, AdapterSpec, oracle_logits, tiny_adapters, tiny_llama

TOLERANCE = 1e-4
TARGETS: list[Any] = [
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    "all-linear",
    ("gate_proj", "down_proj"),
]


def random_config(dice: random.Random) -> dict[str, Any]:
    heads, ratio = dice.choice([(2, 1), (4, 2), (4, 4), (2, 2)])
    rope = dice.choice([None, LINEAR_ROPE, LLAMA3_ROPE])
    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // ratio,
        "head_dim": dice.choice([64, 128]),
        "tie_word_embeddings": dice.random() < 0.5,
        "num_hidden_layers": dice.choice([1, 2]),
        "intermediate_size": dice.choice([192, 256]),
    }
    return fields if rope is None else {**fields, "rope_parameters": rope}


def random_adapter(dice: random.Random) -> AdapterSpec:
    rank = dice.choice([4, 7, 8, 16, 33, 64])
    pattern = {"q_proj": dice.choice([4, 12, 40])} if dice.random() < 0.4 else {}
    alphas = {"v_proj": 3.0} if dice.random() < 0.3 else {}
    return AdapterSpec(rank, dice.choice([8, 16, 32]), dice.choice(TARGETS), dice.random() < 0.5, pattern, alphas)


def random_chunks(dice: random.Random, length: int) -> list[int]:
    """A prompt cut into one to three chunks, then up to three single tokens."""
    singles = min(dice.randrange(4), length - 1)
    rest, cuts = length - singles, []
    for _ in range(dice.randrange(3)):
        if rest > 1:
            cuts.append(dice.randrange(1, rest))
            rest -= cuts[-1]
    return [*cuts, rest, *[1] * singles]


@pytest.mark.parametrize("draw", range(6))
def test_compiled_logits_equal_transformers_and_peft(tmp_path: Path, draw: int) -> None:
    dice = random.Random(draw)
    base = tiny_llama(tmp_path, seed=draw, **random_config(dice))
    adapters = tiny_adapters(base, [random_adapter(dice) for _ in range(draw % 6)], seed=draw)
    model, _ = plain_model(base, adapters)
    sequences = [
        [dice.randrange(320) for _ in range(dice.choice([1, 5, 30, 70]))] for _ in range(max(len(adapters) + 1, 2))
    ]
    slots = [*range(len(adapters)), *[-1] * (len(sequences) - len(adapters))]
    sizes = [random_chunks(dice, len(tokens)) for tokens in sequences]
    runner = CompiledRunner(model, CompileOptions(precision="fp32"), len(sequences), padding=dice.choice([0, 3]))
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in range(max(map(len, sizes))):
        chunks = []
        for index, tokens in enumerate(sequences):
            if step < len(sizes[index]):
                chunks.append(Chunk(index, tokens[done[index] : done[index] + sizes[index][step]], slots[index]))
                done[index] += sizes[index][step]
        for chunk, logits in zip(chunks, runner.step(chunks), strict=True):
            parts[chunk.sequence].append(logits)
    for tokens, slot, part in zip(sequences, slots, parts, strict=True):
        want = oracle_logits(base, adapters[slot] if slot >= 0 else None, tokens)
        torch.testing.assert_close(torch.cat(part), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("draw", [2, 1, 4])
def test_torch_compile_equals_the_module_itself(tmp_path: Path, draw: int, pytestconfig: pytest.Config) -> None:
    if draw != 2 and not pytestconfig.getoption("--exhaustive"):
        pytest.skip("one draw, and each family in test_families.py; run with --exhaustive")
    dice = random.Random(100 + draw)
    base = tiny_llama(tmp_path, seed=draw, **random_config(dice))
    module = base.adapted(tiny_adapters(base, [random_adapter(dice)], seed=draw)[0])
    compiled = torch.compile(module, backend="sidestream")
    with torch.no_grad():
        for shape in ((2, 9), (1, 17)):
            ids = torch.randint(0, 320, shape)
            want = module(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, want, atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()
