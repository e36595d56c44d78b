"""Which tokens may follow: one matcher a completion."""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .trial import refusal

Int32 = NDArray[np.int32]
_log = logging.getLogger(__name__)
SLOW_SECONDS = 0.25
"""A step's masks that take longer are looked at one by one, and a mask that does ends its request."""
TOO_SLOW = "a step of it takes more than {:g} s"
_LEXERS = count()
FAULT = "a fault while it was applied; the request alone is affected"


def is_fault(error: BaseException) -> bool:
    """Whether this is llguidance's or our fault, and not the wish to end: a panic in Rust is no Exception."""
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


class Grammar:
    """A compiled constraint, shared by all completions that have it.

    compile      makes llguidance's form of it, the first of which is `first`. Matchers that come from the same one
                 share a lexer, and with it a lock: other threads fill their masks one after the other
    known        tokens that llguidance knows, which may be more
    vocabulary   tokens that have a logit
    eos_ids      the tokens that end a text
    most_lexers  how many are worth their memory
    """

    def __init__(
        self, compile: Callable[[], Any], first: Any, known: int, vocabulary: int, eos_ids: Sequence[int], kind: str
    ) -> None:
        self._compile = compile
        self._forms = [(next(_LEXERS), first)]
        self._begun = [0]  # completions that began with each
        self.most_lexers = 1
        self.words_known, self.words = -(-known // 32), -(-vocabulary // 32)
        self.eos_ids = tuple(eos_ids)
        self.kind = kind

    @property
    def lexers(self) -> int:
        """How many threads can fill masks of it at a time."""
        return len(self._forms)

    def add_lexer(self) -> None:
        """Compile it once more, for completions that begin later."""
        form = self._compile()
        if not form.is_error():
            self._forms.append((next(_LEXERS), form))
            self._begun.append(min(self._begun))

    def matcher(self) -> "Matcher":
        """One for a completion that begins."""
        return Matcher(self, *self.begin())

    def begin(self) -> tuple[int, Any]:
        """(number of the lexer, llguidance's state) of a completion that begins: with the lexer that fewest have begun
        with, of several the newest. Masks of one lexer are filled one after the other: a step waits for the largest
        share.
        """
        fewest = min(self._begun)
        place = max(place for place, begun in enumerate(self._begun) if begun == fewest)
        self._begun[place] += 1
        lexer, form = self._forms[place]
        return lexer, form.deep_copy()


class Matcher:
    """Follows one completion. Its state follows from the completion's tokens alone, so it need not be saved: with
    the tokens it can be made again.
    """

    def __init__(self, grammar: Grammar, lexer: int, state: Any) -> None:
        self.grammar = grammar
        self.lexer, self.state = lexer, state
        self.suspicious = self.too_slow = self._broken = False
        self._seen = self._drafts = 0

    def unseen(self, tokens: list[int], start: int) -> list[int]:
        """Which of `tokens[start:]`, the output so far, have come since this was asked last; take them in."""
        fresh = tokens[start + self._seen :]
        self._seen = len(tokens) - start
        return fresh

    def take_in(self, fresh: list[int]) -> None:
        """Go on by these tokens. Where they do not fit, or llguidance gives up, it has `failed`."""
        try:
            for token in fresh:
                if not self._consume(token):
                    break
        except BaseException as error:
            self.note_fault(error, "a token was taken in")

    def _consume(self, token: int) -> bool:
        if not self.suspicious:
            return bool(self.state.consume_token(token))
        begin = time.thread_time()
        consumed = bool(self.state.consume_token(token))
        self.too_slow |= time.thread_time() - begin > SLOW_SECONDS
        return consumed

    def note_fault(self, error: BaseException, when: str) -> None:
        """It has failed by this. Raises the error again if it is the wish to end."""
        if not is_fault(error):
            raise error
        _log.error("a fault while %s", when, exc_info=error)
        self._broken = True

    def begin_again(self, output: list[int]) -> None:
        """Take all of the output so far in once more, where nobody knows what has been taken in."""
        self.lexer, self.state = self.grammar.begin()
        self.take_in(output)

    def fill(self, mask: Int32) -> None:
        """Write which tokens may come next, into zeros as wide as llguidance writes them. Twice too slow: it fails."""
        begin = time.thread_time()
        try:
            self.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException as error:
            self.note_fault(error, "a mask was filled")
        slow = time.thread_time() - begin > SLOW_SECONDS
        self.too_slow |= slow and self.suspicious
        self.suspicious = slow

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
            (self.lexer, self.state), self._seen = self.grammar.begin(), 0
        self._drafts = 0

    @property
    def failed(self) -> bool:
        """Whether it cannot go on: llguidance has given up."""
        return self.too_slow or self._broken or bool(self.state.is_error())

    def problem(self) -> str:
        """Why, for the request's client."""
        if self.too_slow:
            return refusal(self.grammar.kind, TOO_SLOW.format(SLOW_SECONDS))
        if self._broken:
            return f"structured_outputs.{self.grammar.kind} caused {FAULT}"
        return refusal(self.grammar.kind, self.state.get_error())

    @property
    def accepting(self) -> bool:
        """Whether the completion may end here."""
        return bool(self.state.is_accepting())
