"""The plain model against transformers and peft: same logits, token by token, whatever the config, the adapters and
the chunking.
"""

import random
from pathlib import Path

import pytest
import torch
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import LINEAR_ROPE, LLAMA3_ROPE, AdapterSpec, oracle_logits, tiny_adapters, tiny_llama

TOLERANCE = 1e-4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MIXED = [
    AdapterSpec(rank=4, alpha=8, targets=("q_proj", "v_proj")),
    AdapterSpec(rank=16, alpha=16, use_rslora=True),
    AdapterSpec(rank=64, alpha=32, targets="all-linear", use_rslora=True, alpha_pattern={"up_proj": 4}),
    AdapterSpec(
        rank=8,
        rank_pattern={"k_proj": 24, "layers.1.mlp.down_proj": 2},
        alpha_pattern={r"layers\.0\..*": 5, "down_proj": 7},
    ),
    AdapterSpec(rank=5, targets=("gate_proj", "o_proj"), extra={"layers_to_transform": [1]}),
]


def run_in_chunks(
    runner: PagedRunner, sequences: list[list[int]], adapters: list[int], sizes: list[list[int]]
) -> list[torch.Tensor]:
    """Feeds every sequence in chunks of the given sizes, all sequences side by side in the same steps; logits [S, V]
    for each.
    """
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in range(max(map(len, sizes))):
        chunks = []
        for index, tokens in enumerate(sequences):
            if step < len(sizes[index]):
                chunks.append(Chunk(index, tokens[done[index] : done[index] + sizes[index][step]], adapters[index]))
                done[index] += sizes[index][step]
        for chunk, logits in zip(chunks, runner.step(chunks), strict=True):
            pieces[chunk.sequence].append(logits)
    return [torch.cat(parts) for parts in pieces]


def random_tokens(count: int, vocab: int = 320) -> list[int]:
    return torch.randint(0, vocab, (count,)).tolist()


CONFIGS = {
    "mha-64-default": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "gqa2-64-tied-llama3": {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "gqa4-64-linear": {"num_key_value_heads": 1, "rope_parameters": LINEAR_ROPE},
    "gqa2-128-llama3": {
        "head_dim": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3_ROPE,
    },
    "mha-128-tied-derived": {
        "head_dim": None,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": None,
        "tie_word_embeddings": True,
    },
    "gqa4-128-linear": {
        "head_dim": 128,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rope_parameters": LINEAR_ROPE,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    base = tiny_llama(tmp_path, seed=len(name), **CONFIGS[name])
    adapters = tiny_adapters(base, [AdapterSpec(rank=8), AdapterSpec(rank=32, use_rslora=True, targets=ATTENTION)])
    model, _ = plain_model(base, adapters)
    sequences = [random_tokens(count) for count in (70, 1, 33)]
    got = run_in_chunks(PagedRunner(model, 3, padding=3), sequences, [0, -1, 1], [[70], [1], [33]])
    for logits, tokens, adapter in zip(got, sequences, [adapters[0], None, adapters[1]], strict=True):
        torch.testing.assert_close(logits, oracle_logits(base, adapter, tokens), atol=TOLERANCE, rtol=0)


def test_six_kinds_of_requests_share_every_step(tmp_path: Path) -> None:
    """Five unlike adapters and the base alone, in whole prefill, chunked prefill and decode steps that mix all of
    them.
    """
    base = tiny_llama(tmp_path, num_key_value_heads=1)
    adapters = tiny_adapters(base, MIXED)
    model, loaded = plain_model(base, adapters)
    assert [adapter.rank for adapter in loaded] == [4, 16, 64, 24, 5]
    sequences = [random_tokens(count) for count in (90, 20, 67, 3, 12, 130)]
    slots = [0, 1, 2, 3, 4, -1]
    sizes = [[64, 26], [17, 1, 1, 1], [66, 1], [1, 1, 1], [12], [40, 30, 58, 1, 1]]
    got = run_in_chunks(PagedRunner(model, 6, padding=2), sequences, slots, sizes)
    for logits, tokens, slot in zip(got, sequences, slots, strict=True):
        adapter = adapters[slot] if slot >= 0 else None
        torch.testing.assert_close(logits, oracle_logits(base, adapter, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("draw", range(4))
def test_random_batches(tmp_path: Path, draw: int) -> None:
    """Random configs, adapters (0 to 5), lengths and chunkings."""
    dice = random.Random(draw)
    base = tiny_llama(
        tmp_path,
        seed=draw,
        head_dim=dice.choice([64, 128]),
        num_key_value_heads=dice.choice([1, 2, 4]),
        tie_word_embeddings=dice.random() < 0.5,
        rope_parameters=dice.choice([None, LINEAR_ROPE, LLAMA3_ROPE]),
    )
    everything = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
    specs = [
        AdapterSpec(
            rank=dice.choice([4, 7, 16, 48, 64]),
            alpha=dice.choice([1, 8, 32]),
            targets=dice.sample(everything, dice.randint(1, 7)),
            use_rslora=dice.random() < 0.5,
            rank_pattern={} if dice.random() < 0.5 else {dice.choice(everything): 12},
            alpha_pattern={} if dice.random() < 0.5 else {dice.choice(everything): 3},
        )
        for _ in range(dice.randint(0, 5))
    ]
    adapters = tiny_adapters(base, specs)
    model, _ = plain_model(base, adapters)
    slots = [dice.randrange(-1, len(adapters)) for _ in range(5)]
    sequences = [random_tokens(dice.randint(1, 100)) for _ in slots]
    sizes = []
    for tokens in sequences:
        cuts = sorted(dice.sample(range(1, len(tokens)), min(dice.randint(0, 3), len(tokens) - 1)))
        sizes.append([end - start for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)])
    got = run_in_chunks(PagedRunner(model, len(slots)), sequences, slots, sizes)
    for logits, tokens, slot in zip(got, sequences, slots, strict=True):
        adapter = adapters[slot] if slot >= 0 else None
        torch.testing.assert_close(logits, oracle_logits(base, adapter, tokens), atol=TOLERANCE, rtol=0)


def test_a_slot_can_be_emptied(tmp_path: Path) -> None:
    from sidestream.graphs.lora_stacks import fill_slot

    base = tiny_llama(tmp_path, num_hidden_layers=1)
    model, _ = plain_model(base, tiny_adapters(base, [AdapterSpec()]))
    fill_slot(model, 0, None)
    tokens = random_tokens(9)
    torch.testing.assert_close(
        PagedRunner(model, 1).step([Chunk(0, tokens, 0)])[0], oracle_logits(base, None, tokens), atol=TOLERANCE, rtol=0
    )
