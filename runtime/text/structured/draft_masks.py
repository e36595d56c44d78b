"""Masks of a step with drafts: allowed next tokens of each completion, and after each of its valid drafts."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from .mask_filling import FEW, PendingMasks, empty_masks, fill
from .matcher import Int32, Matcher

# Compute no further draft masks after this time: the device would wait for them, and one slow constraint must not delay
# all other sequences.
DRAFT_SECONDS = 0.01
WAKING_SECONDS = 0.0003  # use several threads if the masks of the previous draft took longer
Judge = Callable[[list[int], int, Int32], list[bool]]


def fill_drafted(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], judge: Judge, filling: PendingMasks | None = None
) -> tuple[Int32, Int32, Int32]:
    """Return the masks of a step: (matcher index [N], number of its preceding drafts [N], words [N, W]).

    The first masks are those without preceding drafts, one per matcher.

    drafts   candidate tokens of each matcher. There is no mask after a draft that its grammar or `judge` does not
             allow, after one that ends the text, or after the time limit; the caller must drop the drafts from there on
    judge    (matcher indices, number of preceding drafts, words [N, W]) -> whether each completion can continue. It may
             clear bits of the masks; a mask after drafts is dropped if the completion cannot continue
    filling  the masks without drafts, in progress, in `empty_masks` with room for all; None: fill them here

    Restores the matchers' state.
    """
    if filling is None:
        filling = PendingMasks(empty_masks(matchers, len(matchers) + sum(map(len, drafts))), matchers)
        filling.run(len(matchers) > FEW)
    masks, width = filling.wait(), matchers[0].grammar.words
    of: list[int] = []
    places: list[int] = []
    kept: list[int] = []
    valid, used, took = list(range(len(matchers))), 0, filling.seconds
    begin = time.monotonic() - took
    for place in range(1 + max(map(len, drafts))):
        level = masks[used : used + len(valid)]
        if place:
            before = time.monotonic()
            fill(level, [matchers[index] for index in valid], len(valid) > FEW or took > WAKING_SECONDS)
            took = time.monotonic() - before
        verdicts = judge(valid, place, level[:, :width])
        followed = []
        for row, index in enumerate(valid):
            matcher, words = matchers[index], level[row, :width]
            goes_on = verdicts[row]
            if goes_on or not place:
                of.append(index)
                places.append(place)
                kept.append(used + row)
            if goes_on and place < len(drafts[index]) and _follow(matcher, words, drafts[index][place]):
                followed.append(index)
        used += len(valid)
        valid = followed
        if not valid or time.monotonic() - begin > DRAFT_SECONDS:
            break
    for matcher in matchers:
        matcher.rollback()
    words = masks[:used] if len(kept) == used else masks[kept]
    return np.array(of, np.int32), np.array(places, np.int32), words[:, :width]


def _follow(matcher: Matcher, words: Int32, draft: int) -> bool:
    if matcher.suspicious or draft in matcher.grammar.eos_ids or not _allows(words, draft):
        return False
    return matcher.try_draft(draft)


def _allows(words: Int32, token: int) -> bool:
    return 0 <= token < 32 * len(words) and bool(words[token // 32] >> token % 32 & 1)
