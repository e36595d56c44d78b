"""Drafts are what followed the latest of the longest earlier occurrences of the end, found here by looking at every
place in turn.
"""

import random

import pytest
import torch
from sidestream.ops.spec_decode.draft_ngram import LONGEST, WINDOW, draft_ngram
from support.checks import EXACT, check_kernel
from support.drafts import histories, int32, steps_of_drafts, with_repeats
from support.sm90 import launched

LENGTHS = [1, 2, 3, 20, 64, 96]


def drafts_of(tokens: list[int], count: int) -> tuple[list[int], int]:
    """The definition, in plain Python: drafts, and how many tokens agreed."""
    best, at = -1, len(tokens) - 2
    for place in range(max(0, len(tokens) - 1 - WINDOW), len(tokens) - 1):
        agreed = 0
        while agreed < LONGEST and agreed <= place and tokens[place - agreed] == tokens[-1 - agreed]:
            agreed += 1
        if agreed >= best:
            best, at = agreed, place
    drafts: list[int] = []
    for step in range(count):
        drafts.append((tokens + drafts)[at + 1 + step])
    return drafts, max(best, 0)


def test_repeats_are_drafted() -> None:
    line = [7, 1, 2, 3, 4, 9, 5, 1, 2, 3, 8, 6, 1, 2, 3]
    for tokens, drafts, agreed in (
        (line, [8, 6, 1, 2], 3),  # the latest of two places
        ([4, *line, 4, 9, 5, 1, 2, 3], [8, 6, 1, 2], 8),
        ([5, 1, 2, 5, 1, 2, 5], [1, 2, 5, 1], 4),  # beyond the end the cycle goes on
        ([3, 3, 3], [3, 3, 3, 3], 2),
        ([1, 2, 3], [3, 3, 3, 3], 0),  # nothing came before
        ([8], [8, 8, 8, 8], 0),
    ):
        history = int32(*tokens).view(1, -1)
        made, agrees = draft_ngram(history, int32(len(tokens)), int32(0), 4)
        assert made.tolist() == [drafts] and agrees.tolist() == [agreed]


def test_the_reference_is_the_definition() -> None:
    source = random.Random(3)
    rows = [with_repeats(source, source.randrange(1, 96), 12) for _ in range(60)]
    history = torch.zeros(60, 96, dtype=torch.int32)
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = int32(*tokens)
    order = source.sample(range(60), 60)
    drafts, agreed = draft_ngram(history, int32(*map(len, rows)), int32(*order), 7)
    assert list(zip(drafts.tolist(), agreed.tolist(), strict=True)) == [drafts_of(rows[row], 7) for row in order]


def test_places_before_the_window_are_forgotten() -> None:
    tokens = [1, 2, 3, 4, *range(10, 10 + WINDOW), 1, 2, 3]
    history = int32(*tokens).view(1, -1)
    assert draft_ngram(history, int32(len(tokens)), int32(0), 1)[0].tolist() == [[3]]
    assert draft_ngram(history[:, 4:].contiguous(), int32(WINDOW), int32(0), 1)[0].tolist() == [[9 + WINDOW]]


@pytest.mark.interpret
@pytest.mark.parametrize("count", [1, 3, 7])
def test_kernel(count: int) -> None:
    check_kernel(draft_ngram, *histories(LENGTHS), int32(5, -1, 0, 1, 3, 2, 4), count, tolerances={0: EXACT, 1: EXACT})


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 7])
def test_on_the_gpu(count: int) -> None:
    long = histories([8192, 20000, 5000], "cuda", 20480)
    check_kernel(
        draft_ngram, *long, int32(2, -1, 0, 1, device="cuda"), count, tolerances={0: EXACT, 1: EXACT}, pdl=True
    )


def test_compiles_for_hopper_without_spills() -> None:
    history, lengths, rows, count = (
        each.to("meta") if isinstance(each, torch.Tensor) else each for each in steps_of_drafts()["draft_ngram"]
    )
    (code,) = launched(draft_ngram, history, lengths, rows, count, pdl=True)
    assert code.spills == 0
