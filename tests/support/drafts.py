"""Sequences with repeats, for the ops of speculation and for engines that speculate."""

import random
from typing import Any

import torch
from sidestream.ops.spec_decode.store_answers import SEPARATOR

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


def answers_to_keep(device: str = "cpu", ring_width: int = 80) -> tuple[torch.Tensor, ...]:
    """(history, kept, rings): stretches of three rows; one goes over the end of its ring, one fills all of another."""
    history, _ = histories([90, 40, ring_width - 1], device, ring_width + 10)
    kept = int32([0, 3, 60, 2, ring_width - 20], [1, 39, 40, 2, 38], [2, 0, ring_width - 1, 0, 11], device=device)
    rings = torch.randint(2000, 3000, (4, ring_width), dtype=torch.int32, device=device)
    return history, kept, rings


def rings_of_answers(device: str = "cpu", most: int = 3, ring_width: int = 120) -> tuple[torch.Tensor, ...]:
    """Arguments of `draft_recalled` for seven sequences: without a row, without a ring, with an empty one, with one of
    rubbish, with own tokens that agree with all that counts, and two that their ring knows better: in one of them it
    is full, and its newest token does not lie at its end.
    """
    source = random.Random(ring_width)
    history, lengths = histories([70, 3, 64, 95, 33, 90, 50], device)
    rings = torch.randint(3000, 4000, (4, ring_width), dtype=torch.int32)
    ends = [30, 0, ring_width // 2, 40]
    for ring, known in ((0, 30), (2, ring_width)):
        stretches: list[int] = []
        for row in (3, 4, 5, 6):
            length = int(lengths[row])
            stretches += [SEPARATOR, *history[row, length - 9 : length].tolist(), *with_repeats(source, 9)]
        kept = int32(*stretches).repeat(-(-known // len(stretches)))[-known:]
        rings[ring, (ends[ring] - known + torch.arange(known)) % ring_width] = kept
    which = int32(0, -1, 1, 3, 2, 2, 0, device=device)
    filled = int32(30, 0, 0, 40, ring_width, ring_width, 30, device=device)
    rows = int32(-1, 2, 0, 3, 4, 5, 6, device=device)
    agreed = int32(0, 0, 0, 1, 8, 2, 0, device=device)
    drafts = torch.randint(0, 50, (7, most), dtype=torch.int32, device=device)
    places = int32(*[ends[ring] for ring in which.tolist()], device=device)
    return history, lengths, rows, agreed, rings.to(device), which, places, filled, drafts
