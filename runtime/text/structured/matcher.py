"""Allowed next tokens of one completion, by llguidance."""

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
SLOW_SECONDS = 0.25  # slower masks of a step are timed one by one, and a slower single mask fails its request
TOO_SLOW = "a step of it takes more than {:g} s"
_LEXERS = count()
FAULT = "an internal error; only this request is affected"


def is_fault(error: BaseException) -> bool:
    """Return whether this is an error, Rust panics included, and not a request to exit."""
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


class Grammar:
    """A compiled constraint, shared by its completions.

    compile      creates llguidance's form of the constraint; `first` is the first form. Matchers of one form share a
                 lexer and its lock, so their masks are filled one after another
    num_tokens   number of llguidance's tokens, possibly more than `vocabulary`
    vocabulary   number of tokens with a logit
    eos_ids      tokens that end a text
    max_lexers   maximum number of forms
    """

    def __init__(
        self,
        compile: Callable[[], Any],
        first: Any,
        num_tokens: int,
        vocabulary: int,
        eos_ids: Sequence[int],
        kind: str,
    ) -> None:
        self._compile = compile
        self._forms = [(next(_LEXERS), first)]
        self._completions = [0]  # completions started with each form
        self.max_lexers = 1
        self.llguidance_words, self.words = -(-num_tokens // 32), -(-vocabulary // 32)
        self.eos_ids = tuple(eos_ids)
        self.kind = kind

    @property
    def lexers(self) -> int:
        """Number of threads that can fill masks of this grammar at the same time."""
        return len(self._forms)

    def add_lexer(self) -> None:
        """Compile another form of the constraint, for later completions."""
        form = self._compile()
        if not form.is_error():
            self._forms.append((next(_LEXERS), form))
            self._completions.append(min(self._completions))

    def matcher(self) -> "Matcher":
        """Return a matcher for a new completion."""
        return Matcher(self, *self.begin())

    def begin(self) -> tuple[int, Any]:
        """Return (lexer number, llguidance's state) for a new completion.

        Uses the lexer with the fewest completions, and the newest one of several. The masks of one lexer are filled one
        after another, and a step waits for the lexer with the most masks.
        """
        fewest = min(self._completions)
        place = max(place for place, started in enumerate(self._completions) if started == fewest)
        self._completions[place] += 1
        lexer, form = self._forms[place]
        return lexer, form.deep_copy()


class Matcher:
    """State of one completion. It depends only on the completion's tokens, so it can be rebuilt from them."""

    def __init__(self, grammar: Grammar, lexer: int, state: Any) -> None:
        self.grammar = grammar
        self.lexer, self.state = lexer, state
        self.suspicious = self.too_slow = self._broken = False
        self._num_returned = self._drafts = 0

    def new_tokens(self, tokens: list[int], start: int) -> list[int]:
        """Return the tokens of the output `tokens[start:]` that earlier calls have not returned."""
        new = tokens[start + self._num_returned :]
        self._num_returned = len(tokens) - start
        return new

    def consume(self, new: list[int]) -> None:
        """Advance by these tokens. If the grammar or llguidance rejects them, the matcher has `failed`."""
        try:
            for token in new:
                if not self._consume(token):
                    break
        except BaseException as error:
            self.record_fault(error, "consuming a token")

    def _consume(self, token: int) -> bool:
        if not self.suspicious:
            return bool(self.state.consume_token(token))
        begin = time.thread_time()
        consumed = bool(self.state.consume_token(token))
        self.too_slow |= time.thread_time() - begin > SLOW_SECONDS
        return consumed

    def record_fault(self, error: BaseException, action: str) -> None:
        """Mark the matcher as failed, and log the error. Raises the error again if it is a request to exit."""
        if not is_fault(error):
            raise error
        _log.error("a fault while %s", action, exc_info=error)
        self._broken = True

    def restart(self, output: list[int]) -> None:
        """Rebuild the state from the whole output so far."""
        self.lexer, self.state = self.grammar.begin()
        self.consume(output)

    def fill(self, mask: Int32) -> None:
        """Write the allowed next tokens to zeros as wide as llguidance writes them. Fails if it is too slow twice."""
        begin = time.thread_time()
        try:
            self.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException as error:
            self.record_fault(error, "filling a mask")
        slow = time.thread_time() - begin > SLOW_SECONDS
        self.too_slow |= slow and self.suspicious
        self.suspicious = slow

    def try_draft(self, draft: int) -> bool:
        """Advance by a draft, until `rollback`; return whether the grammar allows it."""
        begin = time.thread_time()
        self._drafts += 1
        followed = bool(self.state.consume_token(draft))
        self.suspicious |= time.thread_time() - begin > SLOW_SECONDS
        return followed and not self.suspicious

    def rollback(self) -> None:
        """Undo all drafts. Their errors do not fail the completion."""
        if self._drafts and (self.state.is_error() or not self.state.rollback(self._drafts)):
            (self.lexer, self.state), self._num_returned = self.grammar.begin(), 0
        self._drafts = 0

    @property
    def failed(self) -> bool:
        """Whether the completion cannot continue."""
        return self.too_slow or self._broken or bool(self.state.is_error())

    def problem(self) -> str:
        """Return the reason, for the client."""
        if self.too_slow:
            return refusal(self.grammar.kind, TOO_SLOW.format(SLOW_SECONDS))
        if self._broken:
            return f"structured_outputs.{self.grammar.kind} caused {FAULT}"
        return refusal(self.grammar.kind, self.state.get_error())

    @property
    def accepting(self) -> bool:
        """Whether the completion may end here."""
        return bool(self.state.is_accepting())
