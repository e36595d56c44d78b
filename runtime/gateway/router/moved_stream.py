"""A stream that may go on in another engine: what the caller has of it, and chunks as if one engine had sent them."""

import time
from collections.abc import Callable

from msgspec import structs

from ...api.errors import DeadlineError, OverloadedError
from ...api.request import Continuation
from ...protocol.messages import Chunk, Usage
from ..contracts import EngineRequest

MAX_FRUITLESS = 5
"""A request in whose company so many engines died in a row, without a token in between, may be the cause."""
MAX_MOVES = 64


class _Completion:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.characters = 0
        self.finished = False


class MovedStream:
    """One request on its way through engines.

    moves     how often it went on in another engine, or in its own one started again
    clock     seconds, for the deadline and the times in `usage`
    """

    def __init__(self, request: EngineRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self.request = request
        self._direct = request.direct
        self.moves = 0
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._completions = [_Completion() for _ in range(request.params.n)]
        self._held: list[Chunk] = []  # of an answer that is wanted whole
        self._scored = self._scored_here = 0  # prompt tokens with log-probabilities: the caller has, this engine sent
        self._content = ""
        self._fruitless = 0
        self.ended = False

    def continues(self) -> tuple[Continuation, ...]:
        """What the next engine is told: what arrived of the answer, if anything did."""
        if not any(each.token_ids for each in self._completions):
            return ()
        return tuple(Continuation(each.token_ids[:], each.characters, each.finished) for each in self._completions)

    @property
    def streams(self) -> bool:
        """Whether the next engine sends tokens as they come: also of an answer that is wanted whole, once an engine
        died with all of it, so that not every death is one without progress.
        """
        return self.request.stream or self.moves > 0

    def accepted(self, prompt_tokens: int, adapter_content: str) -> None:
        """An engine has taken the request."""
        self._content = adapter_content
        if self.request.when_accepted is not None:
            self.request.when_accepted(prompt_tokens, adapter_content)

    @property
    def content(self) -> str:
        """The version of the adapter that has to go on, once the caller has something of its answer; "" before."""
        return self._content if self._scored or any(each.token_ids for each in self._completions) else ""

    def seconds_left(self) -> float | None:
        """Until the deadline, which counts from the request's arrival. Raises DeadlineError when it has passed."""
        if self.request.deadline_seconds is None:
            return None
        left = self.request.deadline_seconds - (self._clock() - self._started)
        if left <= 0:
            raise DeadlineError("the request's deadline passed; allow it more time", "deadline_exceeded")
        return left

    def moved(self, problem: Exception) -> None:
        """Its engine died. Raises `problem` when that happened too often."""
        self.moves += 1
        self._fruitless += 1
        self._scored_here = 0
        if self._fruitless > MAX_FRUITLESS or self.moves > MAX_MOVES:
            raise problem

    def take(self, chunks: list[Chunk]) -> list[Chunk]:
        """Chunks of the present engine, as the caller gets them: may be none yet.

        Raises OverloadedError when the engine gave the request up because it stops.
        """
        scored = False
        for chunk in chunks:
            if chunk.finish_reason == "abort":  # nobody here asked for it
                raise OverloadedError("the engine was stopped", "draining", 1.0)
            scored = scored or bool(chunk.prompt_logprobs)
        if chunks[-1].usage is not None:
            self.ended = True
            if self.moves:
                chunks = [*chunks[:-1], structs.replace(chunks[-1], usage=self._usage(chunks[-1].usage))]
        if scored:
            chunks = [each for chunk in chunks if (each := self._with_new_scores(chunk)) is not None]
        for chunk in chunks:
            self._keep(chunk)
        if self.request.stream:
            return chunks
        self._held += chunks
        return self._held if self.ended else []

    def direct(self, chunk: Chunk) -> bool:
        """Offer a chunk from the middle of the answer to the caller's `direct`."""
        if self._direct is None or not self._direct(chunk):
            return False
        self._keep(chunk)
        return True

    def _keep(self, chunk: Chunk) -> None:
        """The caller has it: the next engine is to know."""
        if chunk.token_ids:
            self._fruitless = 0
            if self._first_token is None:
                self._first_token = self._clock()
        completion = self._completions[chunk.index]
        completion.token_ids += chunk.token_ids
        completion.characters += len(chunk.text)
        completion.finished = completion.finished or chunk.finish_reason is not None

    def _with_new_scores(self, chunk: Chunk) -> Chunk | None:
        """A chunk without the prompt's log-probabilities that a former engine has sent; None if nothing is left."""
        if not chunk.prompt_logprobs:
            return chunk
        begin = self._scored_here
        self._scored_here += len(chunk.prompt_logprobs)
        fresh = chunk.prompt_logprobs[max(0, self._scored - begin) :]
        self._scored = max(self._scored, self._scored_here)
        return structs.replace(chunk, prompt_logprobs=fresh) if fresh else None

    def _usage(self, told: Usage) -> Usage:
        """What the last engine told, with the times of the whole way; it counts the tokens of before itself."""
        now = self._clock()
        first = now if self._first_token is None else self._first_token
        return structs.replace(told, first_token_seconds=first - self._started, total_seconds=now - self._started)
