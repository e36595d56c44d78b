"""Ring buffers of earlier answers: which tokens are stored and drafted, compared with plain Python."""

import random

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.spec_decode.draft_from_answers import draft_recalled
from sidestream.ops.spec_decode.draft_ngram import LONGEST
from sidestream.ops.spec_decode.store_answers import SEPARATOR, keep_answers
from support.checks import check_kernel
from support.drafts import answers_to_keep, int32, rings_of_answers, with_repeats
from support.sm90 import launched


def recalled_of(tokens: list[int], ring: list[int], own: int, count: int) -> list[int] | None:
    """The definition: drafts from a ring, oldest token first, or None where it does not know better."""
    best, at = own, None
    for place in range(len(ring) - 1):
        agreed = 0
        while agreed < min(LONGEST, len(tokens), place + 1) and ring[place - agreed] == tokens[-1 - agreed]:
            agreed += 1
        if ring[place + 1] != SEPARATOR and agreed > own and agreed >= best:
            best, at = agreed, place
    if at is None:
        return None
    return [max(token, 0) for token in [*ring[at + 1 : at + 1 + count], *[0] * count][:count]]


def recall(tokens: list[int], ring: list[int], own: int = 0, count: int = 3, end: int = 0) -> list[int] | None:
    """Return the op's result for one sequence and one ring; the newest token is before `end`."""
    rings = torch.full((1, 40), 77, dtype=torch.int32)
    rings[0, (end - len(ring) + torch.arange(len(ring))) % 40] = int32(*ring)
    drafts = torch.full((1, count), -7, dtype=torch.int32)
    history = int32(*tokens).view(1, -1)
    one = int32(0)
    recalled = draft_recalled(
        history, int32(len(tokens)), one, int32(own), rings, one, int32(end), int32(len(ring)), drafts
    )
    return drafts[0].tolist() if recalled.item() else None


@pytest.mark.parametrize("end", [0, 3, 39])
def test_the_longest_agreement_is_drafted_from(end: int) -> None:
    ring = [SEPARATOR, 1, 2, 3, 4, 5, SEPARATOR, 9, 2, 3, 6, 7]
    for tokens, own, drafts in (
        ([1, 2, 3], 0, [4, 5, 0]),
        ([8, 2, 3], 0, [6, 7, 0]),  # the latest of two
        ([8, 2, 3], 1, [6, 7, 0]),
        ([8, 2, 3], 2, None),  # the sequence's own tokens agree with as many
        ([3, 4, 5], 0, None),  # nothing comes after it
        ([9, 9, 9], 0, [2, 3, 6]),
        ([9], 0, [2, 3, 6]),
        ([8], 0, None),
        ([77], 0, None),  # of a ring only what was kept counts
    ):
        assert recall(tokens, ring, own, end=end) == drafts == recalled_of(tokens, ring, own, 3)


def test_the_reference_is_the_definition() -> None:
    source = random.Random(7)
    found = 0
    for _ in range(60):
        ring = with_repeats(source, source.randrange(0, 41), 12)
        ring = [SEPARATOR if source.random() < 0.1 else token for token in ring]
        tokens = with_repeats(source, source.randrange(1, 30), 12)
        if len(ring) > 12 and source.random() < 0.5:
            tokens += [token for token in ring[3:9] if token != SEPARATOR]
        own, count = source.randrange(0, 5), source.choice([1, 3, 7])
        drafts = recall(tokens, ring, own, count, source.randrange(40))
        assert drafts == recalled_of(tokens, ring, own, count)
        found += drafts is not None
    assert 10 < found < 60


def test_what_is_kept_lies_where_the_host_says() -> None:
    history, kept, rings = answers_to_keep()
    before = rings.clone()
    keep_answers(history, kept, rings)
    first = [SEPARATOR, *history[0, 3:60].tolist()]
    assert [*rings[2, 60:].tolist(), *rings[2, :38].tolist()] == first, "over the ring's end"
    assert rings[2, 38:40].tolist() == [SEPARATOR, int(history[1, 39])]
    assert torch.equal(rings[2, 40:60], before[2, 40:60])
    assert rings[0, 11] == SEPARATOR and rings[0].roll(-12)[:-1].tolist() == history[2, :79].tolist()
    assert torch.equal(rings[1], before[1]) and torch.equal(rings[3], before[3])


@pytest.mark.interpret
@pytest.mark.parametrize("most", [1, 3, 7])
def test_recall_kernel(most: int) -> None:
    for ring_width in (120, 5000):
        (recalled,) = check_kernel(OPS["draft_recalled"], *rings_of_answers(most=most, ring_width=ring_width))
        assert recalled.tolist() == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.interpret
def test_keep_kernel() -> None:
    for ring_width in (80, 1100):
        check_kernel(OPS["keep_answers"], *answers_to_keep(ring_width=ring_width))


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_kernel(OPS["keep_answers"], *answers_to_keep("cuda"), pdl=True)
    for ring_width in (120, 8192):
        check_kernel(OPS["draft_recalled"], *rings_of_answers("cuda", 7, ring_width), pdl=True)


@pytest.mark.parametrize("name", ["draft_recalled", "keep_answers"])
def test_compiles_for_hopper_without_spills(name: str) -> None:
    args = rings_of_answers(most=7) if name == "draft_recalled" else answers_to_keep()
    (code,) = launched(OPS[name], *(each.to("meta") for each in args), pdl=True)
    assert code.spills == 0
