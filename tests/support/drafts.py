"""Sequences with repeats, for the ops of speculation and for engines that speculate."""

import random
from typing import Any

import torch

WIDTH = 96


def with_repeats(source: random.Random, length: int, vocabulary: int = 50) -> list[int]:
    """Tokens of which many come again in the same order, as in tables, code and lists."""
    phrases = [[source.randrange(vocabulary) for _ in range(source.randrange(2, 7))] for _ in range(3)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += source.choice([*phrases, [source.randrange(vocabulary)]])
    return tokens[:length]


def int32(*values: Any, device: str = "cpu") -> torch.Tensor:
    """A tensor of these numbers or lists."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def histories(lengths: list[int], device: str = "cpu", width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """(history [R, width], lengths [R]): rows of so many tokens with repeats, and rubbish after them."""
    source = random.Random(len(lengths))
    history = torch.randint(1000, 2000, (len(lengths), width), dtype=torch.int32)
    for row, length in enumerate(lengths):
        history[row, :length] = int32(*with_repeats(source, length))
    return history.to(device), int32(*lengths, device=device)


def steps_of_drafts(device: str = "cpu", most: int = 3) -> dict[str, tuple[Any, ...]]:
    """Arguments of the three ops for one step of five sequences: one that is not followed, one whose inputs are known,
    and three with 0 to `most` drafts, of which some hold. The row of the last has no room for all its tokens.
    """
    history, lengths = histories([70, 1, 64, 95, 33, 90], device)
    rows, counts = int32(4, -1, 2, 0, 3, device=device), int32(most, 0, -1, 0, most, device=device)
    query_start = int32(0, 1 + most, 2 + most, 8 + most, 9 + most, 10 + 2 * most, 10 + 2 * most, device=device)
    tokens = 10 + 2 * most
    drafts = torch.randint(0, 50, (5, most), dtype=torch.int32, device=device)
    sampled = torch.randint(0, 50, (tokens,), dtype=torch.int32, device=device)
    if most:
        sampled[: most - 1], sampled[9 + most : 9 + 2 * most] = drafts[0, :-1], drafts[4]
    table = torch.randperm(24, dtype=torch.int32).view(6, 4).to(device)
    inputs = [torch.full((tokens,), -5, dtype=torch.int32, device=device) for _ in range(3)]
    context_lens = torch.full((6,), -5, dtype=torch.int32, device=device)
    return {
        "draft_ngram": (history, lengths, rows, most),
        "place_drafts": (history, lengths, drafts, rows, counts, query_start, table, *inputs, context_lens),
        "accept_drafts": (sampled, drafts, rows, counts, query_start[:5], history.clone(), lengths.clone()),
    }
