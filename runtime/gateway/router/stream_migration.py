"""A stream that can continue in another engine: what its consumer received, and chunks as if from one engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from ...api.errors import DeadlineError, OverloadedError
from ...api.request import Continuation
from ...protocol.messages import Chunk, Usage
from ..interfaces import EngineRequest

MAX_FRUITLESS_MIGRATIONS = 5
"""Limit on engine deaths in a row without a token in between: the request may be their cause."""
MAX_MIGRATIONS = 64


@dataclass
class _Received:
    """What the consumer received of one completion."""

    token_ids: list[int] = field(default_factory=list)
    characters: int = 0
    finished: bool = False


class MigratingStream:
    """One request, across the engines that serve it.

    migrations   number of times that it continued in another engine, or in a restarted one
    clock        seconds, for the deadline and the times in `usage`
    """

    def __init__(self, request: EngineRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self.request = request
        self._direct = request.direct
        self.migrations = 0
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._completions = [
            _Received(each.token_ids[:], each.characters, each.finished) for each in request.continues
        ] or [_Received() for _ in range(request.params.n)]
        self._held: list[Chunk] = []  # chunks of a request without streaming
        self._scored = 0  # prompt tokens with log-probabilities that the consumer received
        self._scored_here = 0  # the same that this engine sent
        self._adapter_content = ""
        self._fruitless_migrations = 0
        self.ended = False

    def continuations(self) -> tuple[Continuation, ...]:
        """Return the received part of each completion for the next engine; empty if no token arrived."""
        if not any(each.token_ids for each in self._completions):
            return ()
        return tuple(Continuation(each.token_ids[:], each.characters, each.finished) for each in self._completions)

    @property
    def engine_streams(self) -> bool:
        """Whether the next engine streams its chunks.

        After a migration it always does, so that the part before another death is not lost.
        """
        return self.request.stream or self.migrations > 0

    def on_accepted(self, prompt_tokens: int, adapter_content: str) -> None:
        """Record that an engine accepted the request."""
        self._adapter_content = adapter_content
        if self.request.when_accepted is not None:
            self.request.when_accepted(prompt_tokens, adapter_content)

    @property
    def required_content(self) -> str:
        """Content hash of the adapter version that must continue the answer; "" if nothing was received yet."""
        received = self._scored or any(each.token_ids for each in self._completions)
        return self._adapter_content if received else ""

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline, which counts from arrival. Raises DeadlineError if it has passed."""
        if self.request.deadline_seconds is None:
            return None
        left = self.request.deadline_seconds - (self._clock() - self._started)
        if left <= 0:
            raise DeadlineError("the request's deadline passed; allow it more time", "deadline_exceeded")
        return left

    def migrate(self, problem: Exception) -> None:
        """Prepare for another engine after an error. Raises `problem` after too many migrations."""
        self.migrations += 1
        self._fruitless_migrations += 1
        self._scored_here = 0
        if self._fruitless_migrations > MAX_FRUITLESS_MIGRATIONS or self.migrations > MAX_MIGRATIONS:
            raise problem

    def receive(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks for the consumer, given those of the current engine. May be empty.

        Raises OverloadedError if the engine aborted the request because it stops.
        """
        scored = False
        for chunk in chunks:
            if chunk.finish_reason == "abort":  # the gateway did not abort it
                raise OverloadedError("the engine was stopped", "draining", 1.0)
            scored = scored or bool(chunk.prompt_logprobs)
        if chunks[-1].usage is not None:
            self.ended = True
            if self.migrations:
                chunks = [*chunks[:-1], structs.replace(chunks[-1], usage=self._usage(chunks[-1].usage))]
        if scored:
            chunks = [each for chunk in chunks if (each := self._without_known_scores(chunk)) is not None]
        for chunk in chunks:
            self._record(chunk)
        if self.request.stream:
            return chunks
        self._held += chunks
        return self._held if self.ended else []

    def offer_direct(self, chunk: Chunk) -> bool:
        """Offer a chunk from the middle of the answer to the consumer's `direct`. Returns whether it was accepted."""
        if self._direct is None or not self._direct(chunk):
            return False
        self._record(chunk)
        return True

    def _record(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            self._fruitless_migrations = 0
            if self._first_token is None:
                self._first_token = self._clock()
        completion = self._completions[chunk.index]
        completion.token_ids += chunk.token_ids
        completion.characters += len(chunk.text)
        completion.finished = completion.finished or chunk.finish_reason is not None

    def _without_known_scores(self, chunk: Chunk) -> Chunk | None:
        """Remove prompt log-probabilities that an earlier engine sent. Returns None if nothing is left."""
        if not chunk.prompt_logprobs:
            return chunk
        start = self._scored_here
        self._scored_here += len(chunk.prompt_logprobs)
        new = chunk.prompt_logprobs[max(0, self._scored - start) :]
        self._scored = max(self._scored, self._scored_here)
        return structs.replace(chunk, prompt_logprobs=new) if new else None

    def _usage(self, usage: Usage) -> Usage:
        """Return the last engine's usage with the times since arrival. Its token counts include earlier engines."""
        now = self._clock()
        first = now if self._first_token is None else self._first_token
        return structs.replace(usage, first_token_seconds=first - self._started, total_seconds=now - self._started)
