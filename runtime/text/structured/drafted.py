"""Masks along drafts: what may come next in a completion, and after each of its drafts, as far as they stay within its
grammar.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from .filling import FEW, Filling, empty_masks, fill
from .matcher import Int32, Matcher

DRAFT_SECONDS = 0.01
"""No mask of a draft is begun when a step's masks have taken so long: the device would wait for it, and a constraint
whose masks are slow must not cost all others several of them a step.
"""
WAKING_SECONDS = 0.0003
"""Where the masks after so many drafts took longer than this, those after the next draft are for several threads."""
Judge = Callable[[list[int], int, Int32], list[bool]]


def fill_drafted(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], judge: Judge, filling: Filling | None = None
) -> tuple[Int32, Int32, Int32]:
    """The masks of a step: (of which matcher [N], after how many of its drafts [N], words [N, W]), first those without
    a draft, of every matcher.

    drafts  of each matcher: the tokens that may come next. There is no mask after one that its grammar, or `judge`,
            does not allow, after one that ends the text, nor where a mask could not be made in time: from there on
            drafts are to be cut
    judge   (which matchers, drafts before each one's mask, these masks' words [N, W]) -> whether each completion can go
            on there. It may take tokens out of the masks; one with drafts before it is left out where the completion
            cannot go on
    filling the first ones, which no draft precedes, on their way into `empty_masks` that have room for all; None: they
            are filled here

    Matchers come back to where they were.
    """
    if filling is None:
        filling = Filling(empty_masks(matchers, len(matchers) + sum(map(len, drafts))), matchers)
        filling.run(len(matchers) > FEW)
    masks, width = filling.wait(), matchers[0].grammar.words
    of: list[int] = []
    places: list[int] = []
    kept: list[int] = []
    going, used, took = list(range(len(matchers))), 0, filling.seconds
    begin = time.monotonic() - took
    for place in range(1 + max(map(len, drafts))):
        level = masks[used : used + len(going)]
        if place:
            before = time.monotonic()
            fill(level, [matchers[index] for index in going], len(going) > FEW or took > WAKING_SECONDS)
            took = time.monotonic() - before
        verdicts = judge(going, place, level[:, :width])
        followed = []
        for row, index in enumerate(going):
            matcher, words = matchers[index], level[row, :width]
            goes_on = verdicts[row]
            if goes_on or not place:
                of.append(index)
                places.append(place)
                kept.append(used + row)
            if goes_on and place < len(drafts[index]) and _follow(matcher, words, drafts[index][place]):
                followed.append(index)
        used += len(going)
        going = followed
        if not going or time.monotonic() - begin > DRAFT_SECONDS:
            break
    for matcher in matchers:
        matcher.go_back()
    words = masks[:used] if len(kept) == used else masks[kept]
    return np.array(of, np.int32), np.array(places, np.int32), words[:, :width]


def _follow(matcher: Matcher, words: Int32, draft: int) -> bool:
    if matcher.suspicious or draft in matcher.grammar.eos_ids or not _allows(words, draft):
        return False
    return matcher.follow(draft)


def _allows(words: Int32, token: int) -> bool:
    return 0 <= token < 32 * len(words) and bool(words[token // 32] >> token % 32 & 1)
