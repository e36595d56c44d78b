"""A step with drafts leaves a sequence as single-token steps would, compared with a plain loop."""

import itertools
import random
from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.spec_decode.accept_drafts import accept_drafts
from sidestream.ops.spec_decode.place_drafts import place_drafts
from support.checks import EXACT, check_kernel
from support.drafts import int32, steps_of_drafts
from support.sm90 import launched

NAMES = ("place_drafts", "accept_drafts")


def one_by_one(tokens: list[int], drafts: list[int], known: list[int], width: int) -> tuple[list[int], int]:
    """Tokens of a sequence after a step, taken one at a time: go on while the last one was also the draft."""
    known = list(known)
    for accepted, token in enumerate(tokens):
        known.append(max(token, 0))
        if accepted == len(drafts) or drafts[accepted] != token:
            return known[:width], accepted
    raise AssertionError("a sequence samples a token more than it has drafts")


def test_accepting_is_taking_one_token_after_the_other() -> None:
    source = random.Random(5)
    held = 0
    for _ in range(40):
        sequences, most, width = source.randrange(1, 6), source.randrange(0, 5), 40
        lengths = [source.randrange(1, width + 1) for _ in range(sequences)]
        history = torch.randint(0, 3, (sequences, width), dtype=torch.int32)
        counts = [source.randrange(0, most + 1) for _ in range(sequences)]
        sampled = [[source.randrange(-1, 2) for _ in range(1 + count)] for count in counts]
        first = [sum(map(len, sampled[:index])) for index in range(sequences)]
        drafts = torch.randint(0, 2, (sequences, most), dtype=torch.int32)
        expected = [
            one_by_one(tokens, drafts[index, :count].tolist(), history[index, :length].tolist(), width)
            for index, (tokens, count, length) in enumerate(zip(sampled, counts, lengths, strict=True))
        ]
        after = int32(*lengths)
        rows = int32(*range(sequences))
        accepted = accept_drafts(
            int32(*itertools.chain(*sampled)), drafts, rows, int32(*counts), int32(*first), history, after
        )
        for index, (known, number) in enumerate(expected):
            assert accepted[index] == number and after[index] == lengths[index] + number + 1
            assert history[index, : len(known)].tolist() == known
            held += number
    assert held > 20


def test_a_step_computes_the_last_token_and_the_drafts() -> None:
    args = steps_of_drafts()["place_drafts"]
    history, lengths, drafts, rows, counts, query_start, table, input_ids, positions, slots, context_lens = args
    place_drafts(*args)
    for index in (0, 3, 4):
        row, count, first = int(rows[index]), int(counts[index]), int(query_start[index])
        length, mine = int(lengths[row]), slice(first, first + 1 + count)
        assert input_ids[mine].tolist() == [history[row, length - 1], *drafts[index, :count]]
        assert positions[mine].tolist() == list(range(length - 1, length + count))
        assert slots[mine].tolist() == [table[index, place // 64] * 64 + place % 64 for place in positions[mine]]
        assert context_lens[index] == length + count
    for index in (1, 2):
        mine = slice(int(query_start[index]), int(query_start[index + 1]))
        assert context_lens[index] == -5 and (input_ids[mine] == -5).all() and (slots[mine] == -5).all()


def test_who_is_not_followed_stays_as_it_was() -> None:
    sampled, drafts, rows, counts, first, history, lengths = steps_of_drafts()["accept_drafts"]
    before = history.clone(), lengths.clone()
    accepted = accept_drafts(sampled, drafts, rows, counts, first, history, lengths)
    assert accepted.tolist() == [2, 0, 0, 0, 3]
    others = [row for row in range(len(lengths)) if row not in rows.tolist()]
    assert torch.equal(history[others], before[0][others]) and torch.equal(lengths[others], before[1][others])
    assert (lengths - before[1]).tolist() == [1, 0, 1, 4, 3, 0]


def check(name: str, args: tuple[Any, ...], **options: Any) -> None:
    check_kernel(OPS[name], *args, tolerances={0: EXACT}, **options)


@pytest.mark.interpret
@pytest.mark.parametrize("most", [0, 1, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_kernel(name: str, most: int) -> None:
    check(name, steps_of_drafts(most=most)[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_the_gpu(name: str) -> None:
    check(name, steps_of_drafts("cuda", 7)[name], pdl=True)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_hopper_without_spills(name: str) -> None:
    args = [each.to("meta") for each in steps_of_drafts(most=7)[name]]
    (code,) = launched(OPS[name], *args, pdl=True)
    assert code.spills == 0
