"""Requests as messages, chunks of open requests, and chunks as outputs. Opens no socket."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..api.adapter_sum import is_sum, sum_parts
from ..api.adapter_versions import VersionConflictError
from ..api.checks import check_text
from ..api.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError, ServerError
from ..api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ..api.request import Continuation
from ..api.sampling_params import SamplingParams
from ..protocol.messages import (
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_TOKENS,
    AdapterWeight,
    Chunk,
    Continued,
    Error,
    Sampling,
    Submit,
    TokenLogprob,
)
from ..text.prompts import Prompt, adds_special_tokens, text_or_ids
from ..text.token_bytes import as_text

_REQUEST_ERRORS = frozenset(
    {"invalid_request", "unknown_adapter", "adapter_changed", "duplicate_id", "bad_frame", "version_conflict"}
)
_DEAD_ERRORS = frozenset({"engine_dead", "wrong_instance", "hello_first"})
_RETRY_ERRORS = frozenset({"loading", "draining", "overloaded", "too_many_requests", "slow_reader"})


def submission(request_id: str, prompt: Prompt, params: SamplingParams, adapter: str | None, **more: Any) -> Submit:
    """Return the message that submits one prompt.

    Raises RequestError for values that cannot be sent; the server checks all others.
    """
    text, ids = text_or_ids(prompt)
    if adapter is not None:
        check_text("adapter", adapter)
    if text is not None and len(text) > MAX_PROMPT_CHARACTERS:
        raise RequestError(f"the prompt has {len(text)} characters; at most {MAX_PROMPT_CHARACTERS} can be sent")
    if ids is not None and len(ids) > MAX_PROMPT_TOKENS:
        raise RequestError(f"the prompt has {len(ids)} token ids; at most {MAX_PROMPT_TOKENS} can be sent")
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise RequestError("a prompt's token ids must be integers from 0 to 2147483647")
    parts = sum_parts(adapter) if adapter is not None and is_sum(adapter) else ()
    return Submit(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=ids,
        adapter=None if parts else adapter,
        adapters=[AdapterWeight(name, weight) for name, weight in parts],
        sampling=msgspec.convert(params, Sampling, from_attributes=True),
        add_special_tokens=adds_special_tokens(prompt),
        **more,
    )


def continuation_field(so_far: Continuation) -> Continued:
    """Return the state of a completion as a message's field."""
    return Continued(so_far.token_ids, so_far.characters, so_far.finished)


def exception_of(error: Error) -> Exception:
    if error.code in _REQUEST_ERRORS:
        kind_of_refusal = VersionConflictError if error.code == "version_conflict" else RequestError
        refused = kind_of_refusal(error.message)
        refused.code = error.code
        return refused
    kind: type[ServerError] = ServerError
    if error.code in _DEAD_ERRORS:
        kind = EngineDeadError
    elif error.code in _RETRY_ERRORS:
        kind = OverloadedError
    elif error.code == "deadline_exceeded":
        kind = DeadlineError
    return kind(error.message, error.code, error.retry_after)


def is_plain(chunk: Chunk) -> bool:
    """Return whether a chunk neither begins nor ends a completion and has no prompt log-probabilities."""
    return chunk.finish_reason is None and chunk.usage is None and chunk.prompt_logprobs is None and chunk.first > 0


class PendingRequest:
    """The unread chunks of a request. See `AsyncClient.stream_lists` for the callbacks."""

    def __init__(
        self,
        request_id: str,
        continues: Sequence[Continued] = (),
        when_accepted: Callable[[int, str], None] | None = None,
        direct: Callable[[Chunk], bool] | None = None,
    ) -> None:
        self.request_id = request_id
        self._when_accepted, self._direct = when_accepted, direct
        self.accepted = False
        self.ended = False
        self._num_received = {index: len(so_far.token_ids) for index, so_far in enumerate(continues)}
        self._arrived: list[Chunk] = []
        self._problem: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def accept(self, prompt_tokens: int, adapter_content: str) -> None:
        """Record that the server has queued the request."""
        self.accepted = True
        if self._when_accepted is not None:
            self._when_accepted(prompt_tokens, adapter_content)

    def put(self, chunk: Chunk) -> None:
        if self.ended:
            return
        received = self._num_received.get(chunk.index, 0)
        if chunk.first != received:
            text = f"tokens {received} to {chunk.first} of request {self.request_id} did not arrive"
            self.fail(ServerError(text, "bad_frame"))
            return
        self.accepted = True
        self._num_received[chunk.index] = received + len(chunk.token_ids)
        waiter = self._waiter
        try:
            # a waiting task has processed all earlier chunks
            waits = waiter is not None and not waiter.done()
            if waits and self._direct is not None and is_plain(chunk) and self._direct(chunk):
                return
        except Exception as problem:  # raised by `take`
            self.fail(problem)
            return
        self.ended = chunk.usage is not None
        self._arrived.append(chunk)
        self.wake()

    def fail(self, problem: Exception) -> None:
        if not self.ended:
            self.ended = True
            self._problem = problem
            self.wake()

    def wake(self) -> None:
        """Wake the waiting task after the loop's current callback. Tasks run in the order of these calls."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout: float | None) -> list[Chunk]:
        """Return the chunks since the last call; waits for one. After the last chunk raises the request's error.

        Raises TimeoutError after `timeout` seconds without a chunk.
        """
        if not self._arrived and self._problem is None:
            self._waiter = asyncio.get_running_loop().create_future()
            if timeout is None:
                await self._waiter
            else:
                await self._wait(timeout, self._waiter)
        if not self._arrived and self._problem is not None:
            raise self._problem
        chunks, self._arrived = self._arrived, []
        return chunks

    async def _wait(self, timeout: float, waiter: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            raise TimeoutError(f"no answer to request {self.request_id} within {timeout:g} s") from None


class OutputAssembler:
    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams, adapter: str | None) -> None:
        text, ids = text_or_ids(prompt)
        completions = [CompletionOutput(index) for index in range(params.n)]
        self.output = RequestOutput(request_id, text, ids or [], completions, False, adapter)
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    def add(self, chunk: Chunk) -> None:
        """Add a chunk. Raises ServerError for a completion outside the request."""
        if not 0 <= chunk.index < len(self.output.outputs):
            raise ServerError(f"the server sent completion {chunk.index} of {len(self.output.outputs)}", "bad_frame")
        completion = self.output.outputs[chunk.index]
        completion.text += chunk.text
        completion.token_ids.extend(chunk.token_ids)
        if chunk.prompt_logprobs is not None and self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs.extend(map(_entry, chunk.prompt_logprobs))
        if chunk.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + list(map(_entry, chunk.logprobs))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(
                position[0].logprob for position in chunk.logprobs if position
            )
            completion.text_offsets = (completion.text_offsets or []) + (chunk.text_offsets or [])
        if chunk.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = chunk.finish_reason, chunk.stop_reason
            completion.versions = list(chunk.versions or ())
        if chunk.usage is not None:
            now, first = time.time(), chunk.usage.first_token_seconds
            arrival = now - chunk.usage.total_seconds
            self.output.finished, self.output.num_cached_tokens = True, chunk.usage.cached_tokens
            self.output.num_draft_tokens = chunk.usage.draft_tokens
            self.output.num_accepted_tokens = chunk.usage.accepted_tokens
            self.output.num_history_draft_tokens = chunk.usage.history_draft_tokens
            self.output.num_history_accepted_tokens = chunk.usage.history_accepted_tokens
            self.output.num_trained_draft_tokens = chunk.usage.trained_draft_tokens
            self.output.num_trained_accepted_tokens = chunk.usage.trained_accepted_tokens
            self.output.adapter_active = chunk.usage.adapter_active
            self.output.receipt = chunk.receipt
            self.output.metrics = RequestMetrics(arrival, arrival + first if first else None, now)


def _entry(position: list[TokenLogprob]) -> dict[int, Logprob]:
    return {
        token.token_id: Logprob(
            token.logprob,
            token.rank,
            None if token.token_bytes is None else as_text(token.token_bytes),
            token.token_bytes,
        )
        for token in position
    }
