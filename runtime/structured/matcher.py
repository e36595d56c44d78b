"""Which tokens may follow: one matcher a completion, and the packed masks of many at once."""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..requests.errors import RequestError
from ..steps.plan import Int32
from .trial import refusal
from .vocabulary import import_llguidance

SLOW_SECONDS = 0.25
"""A step's masks that take longer are looked at one by one, and a mask that does ends its request."""
FEW = 8
"""So many masks are filled sooner than other threads wake up."""
TOO_SLOW = "a step of it takes more than {:g} s"


class Grammar:
    """A compiled constraint, shared by all completions that have it.

    vocabulary   tokens that have a logit; llguidance may know more
    eos_ids      the tokens that end a text
    """

    def __init__(self, matcher: Any, known: int, vocabulary: int, eos_ids: Sequence[int], kind: str) -> None:
        self._matcher = matcher
        self.words_known, self.words = -(-known // 32), -(-vocabulary // 32)
        self.eos_ids = tuple(eos_ids)
        self.kind = kind

    def matcher(self) -> "Matcher":
        """One for a completion that begins."""
        return Matcher(self, self.begin())

    def begin(self) -> Any:
        """llguidance's state of a completion that begins."""
        return self._matcher.deep_copy()


class Matcher:
    """Follows one completion. Its state follows from the completion's tokens alone, so it need not be saved: with
    the tokens it can be made again.
    """

    def __init__(self, grammar: Grammar, state: Any) -> None:
        self.grammar = grammar
        self.state = state
        self.suspicious = self.too_slow = False
        self._seen = self._drafts = 0

    def advance(self, tokens: list[int], start: int) -> None:
        """Take in `tokens[start:]`, the output so far, of which the first ones are known already.

        Raises RequestError when they do not fit, or llguidance gives up.
        """
        for token in tokens[start + self._seen :]:
            begin = time.thread_time()
            if not self.state.consume_token(token):
                raise RequestError(self.problem())
            self.too_slow |= time.thread_time() - begin > SLOW_SECONDS
        self._seen = len(tokens) - start

    def follow(self, draft: int) -> bool:
        """Go on as if this token had come, until `go_back`; returns whether that can be."""
        begin = time.thread_time()
        self._drafts += 1
        followed = bool(self.state.consume_token(draft))
        self.suspicious |= time.thread_time() - begin > SLOW_SECONDS
        return followed and not self.suspicious

    def go_back(self) -> None:
        """Forget what was followed. What it has brought about, such as an error, is no fault of the completion."""
        if self._drafts and (self.state.is_error() or not self.state.rollback(self._drafts)):
            self.state, self._seen = self.grammar.begin(), 0
        self._drafts = 0

    @property
    def failed(self) -> bool:
        """Whether llguidance has given up."""
        return self.too_slow or bool(self.state.is_error())

    def problem(self) -> str:
        """Why, for the request's client."""
        reason = TOO_SLOW.format(SLOW_SECONDS) if self.too_slow else self.state.get_error()
        return refusal(self.grammar.kind, reason)

    @property
    def accepting(self) -> bool:
        """Whether the completion may end here."""
        return bool(self.state.is_accepting())


def empty_masks(matchers: Sequence[Matcher], count: int) -> Int32:
    """Zeros for so many masks of these matchers, of which there is at least one: as wide as llguidance writes them."""
    return np.zeros((count, max(matcher.grammar.words_known for matcher in matchers)), np.int32)


def fill_masks(matchers: Sequence[Matcher]) -> Int32:
    """Which tokens may come next in each completion: [M, W] words of 32 bits, lowest bit first.

    A matcher that takes too long fails (`failed`); so may any other that goes beyond llguidance's limits.
    """
    if not matchers:
        return np.zeros((0, 0), np.int32)
    masks = empty_masks(matchers, len(matchers))
    fill(masks, matchers, in_parallel=len(matchers) > FEW)
    return masks[:, : matchers[0].grammar.words]


def fill(masks: Int32, matchers: Sequence[Matcher], in_parallel: bool) -> None:
    """The same into `empty_masks` of as many."""
    apart = [row for row, matcher in enumerate(matchers) if matcher.suspicious]
    together = [row for row, matcher in enumerate(matchers) if not matcher.suspicious]
    begin = time.monotonic()
    if in_parallel and len(together) > 1:
        jobs = [(matchers[row].state, row) for row in together]
        _executor().unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.strides[0], len(masks))
    else:
        _fill_one_by_one(masks, matchers, together)
    if time.monotonic() - begin > SLOW_SECONDS:
        for row in together:
            matchers[row].suspicious = True
    _fill_one_by_one(masks, matchers, apart)


def _fill_one_by_one(masks: Int32, matchers: Sequence[Matcher], rows: Sequence[int]) -> None:
    for row in rows:
        matcher, mask = matchers[row], masks[row]
        begin = time.thread_time()
        matcher.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        slow = time.thread_time() - begin > SLOW_SECONDS
        matcher.too_slow |= slow and matcher.suspicious
        matcher.suspicious = slow


@lru_cache(maxsize=1)
def _executor() -> Any:
    """Threads that fill masks in parallel, one set a process."""
    return import_llguidance().LLExecutor()
