"""Unfinished requests, and the chunks that report their progress to clients."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ..api.outputs import CompletionOutput, Logprob, RequestOutput
from ..api.request import Delta
from ..protocol.messages import MAX_CHUNK_LOGPROBS, MAX_CHUNK_TOKENS, Chunk, ErrorCode, TokenLogprob, Usage
from ..scheduler.token_masks import NOTHING_LEFT
from ..text.structured.trial import is_refusal
from .connections import ClientConnection, Connections

MAX_TEXT = 1 << 18
"""Limit on a chunk's characters, so that a frame has room for them in any script."""


@dataclass(eq=False)
class OpenRequest:
    """One request of one connection.

    key              its id in the engine
    adapter_content  version of its adapter in the engine
    admitted         it was added to the engine
    sent             completion index -> number of tokens sent
    scored           number of prompt log-probabilities sent; `scored_here`: those of the current GPU process
    make_receipt     makes the receipt of its output, if it gets one
    prefill_only     it gets the places of its KV pages in place of an answer; `prefilled`: it has got them
    """

    key: str
    request_id: str
    client: ClientConnection
    stream: bool
    arrived: float
    adapter: str | None = None
    adapter_content: str = ""
    prompt_tokens: int = 0
    first_token: float = 0.0
    admitted: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    scored: int = 0
    scored_here: int = 0
    make_receipt: Callable[[RequestOutput], dict[str, Any]] | None = None
    prefill_only: bool = False
    prefilled: bool = False

    def usage(self, output_tokens: int, output: RequestOutput | None = None) -> Usage:
        first = self.first_token - self.arrived if self.first_token else 0.0
        usage = Usage(self.prompt_tokens, output_tokens, 0, first, time.monotonic() - self.arrived)
        if output is None:
            return usage
        queued, metrics = 0.0, output.metrics
        if metrics is not None:
            arrived = metrics.finished_time - usage.total_seconds
            if metrics.scheduled_time is not None:
                queued = max(0.0, metrics.scheduled_time - arrived)
            if not self.stream and metrics.first_token_time is not None:
                first = max(0.0, metrics.first_token_time - arrived)
        return structs.replace(
            usage,
            queue_seconds=queued,
            first_token_seconds=first,
            cached_tokens=output.num_cached_tokens,
            draft_tokens=output.num_draft_tokens,
            accepted_tokens=output.num_accepted_tokens,
            history_draft_tokens=output.num_history_draft_tokens,
            history_accepted_tokens=output.num_history_accepted_tokens,
            trained_draft_tokens=output.num_trained_draft_tokens,
            trained_accepted_tokens=output.num_trained_accepted_tokens,
            preemptions=output.num_preemptions,
            adapter_active=output.adapter_active,
        )


class OpenRequests:
    """The requests by key.

    on_prefilled   called with a request with `prefill_only` that has been computed, in place of its end, and its output
    on_closed      called with each request with `prefill_only` that ends
    """

    on_prefilled: Callable[[OpenRequest, RequestOutput], None]
    on_closed: Callable[[OpenRequest], None]

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._open: dict[str, OpenRequest] = {}
        self._num_opened = 0
        self.counts = {
            "requests_total": 0,
            "finished_total": 0,
            "aborted_total": 0,
            "failed_total": 0,
            "refused_total": 0,
            "overloaded_total": 0,  # of those refused
        }

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[OpenRequest]:
        """Return all requests in order of arrival."""
        return list(self._open.values())

    def get(self, key: str) -> OpenRequest | None:
        return self._open.get(key)

    def open(self, client: ClientConnection, request_id: str, stream: bool, adapter: str | None = None) -> OpenRequest:
        """Add a request. Its id must not be open on the connection."""
        # the number makes keys unique: a client may reuse an id while work for the former request is under way
        self._num_opened += 1
        request = OpenRequest(
            f"{client.number}:{request_id}:{self._num_opened}", request_id, client, stream, time.monotonic(), adapter
        )
        self._open[request.key] = request
        client.open[request_id] = request.key
        self.counts["requests_total"] += 1
        return request

    def close(self, request: OpenRequest, how: str) -> None:
        """Remove a request; `how` names the counter: finished, aborted, failed or refused."""
        self._open.pop(request.key, None)
        request.client.open.pop(request.request_id, None)
        self.counts[f"{how}_total"] += 1
        if request.prefill_only:
            self.on_closed(request)

    def refuse(
        self, request: OpenRequest, code: ErrorCode, message: str, retry_after: float | None = None, how: str = "failed"
    ) -> None:
        self.close(request, how)
        self._connections.send_error(request.client, code, message, request.request_id, retry_after=retry_after)

    def abort(self, request: OpenRequest) -> None:
        """End a request with an `abort` chunk."""
        self.close(request, "finished" if request.prefilled else "aborted")
        sent = sum(request.sent.values())
        self._connections.add_chunk(
            request.client,
            Chunk(request.request_id, 0, request.sent.get(0, 0), "", [], "abort", usage=request.usage(sent)),
        )

    def send_progress(self, deltas: list[Delta], finished: list[RequestOutput]) -> None:
        """Queue chunks for a step's output and close the finished requests."""
        now = time.monotonic()
        ends = {output.request_id: output for output in finished}
        last: dict[str, Delta] = {}
        if ends:
            last = {delta.request_id: delta for delta in deltas if delta.request_id in ends}
        add, opened = self._connections.add_chunk, self._open
        for delta in deltas:
            request = opened.get(delta.request_id)
            if request is None:
                continue
            if delta.prompt_logprobs is not None:
                begin = request.scored_here
                request.scored_here += len(delta.prompt_logprobs)
                scores = list(map(_logprobs, delta.prompt_logprobs[max(0, request.scored - begin) :]))
                request.scored = max(request.scored, request.scored_here)
                for part in _parts(scores):
                    add(request.client, Chunk(request.request_id, delta.index, 0, "", [], prompt_logprobs=part))
                continue
            if not request.first_token:
                request.first_token = now
            first = request.sent.get(delta.index, 0)
            request.sent[delta.index] = first + len(delta.token_ids)
            if delta.finish_reason is not None and last.get(delta.request_id) is delta:
                self._finish(request, ends.pop(delta.request_id), [delta])
            elif delta.finish_reason not in ("timeout", "error"):  # reported once, with the last completion
                add(request.client, _chunk(request.request_id, first, delta))
        for output in ends.values():
            request = opened.get(output.request_id)
            if request is not None:
                self._finish(request, output, [])

    def _finish(self, request: OpenRequest, output: RequestOutput, deltas: list[Delta]) -> None:
        failed = next((each for each in output.outputs if each.finish_reason in ("timeout", "error")), None)
        if failed is not None:
            reason = str(failed.stop_reason)
            code: ErrorCode = "invalid_request" if is_refusal(reason) or reason == NOTHING_LEFT else "request_failed"
            self.refuse(request, "deadline_exceeded" if failed.finish_reason == "timeout" else code, reason)
            return
        if request.prefill_only:
            self.on_prefilled(request, output)
            return
        if not request.first_token:
            request.first_token = time.monotonic()
        usage = request.usage(sum(len(completion.token_ids) for completion in output.outputs), output)
        if request.stream:
            (delta,) = deltas
            chunks = [_chunk(request.request_id, request.sent[delta.index] - len(delta.token_ids), delta)]
        else:
            chunks = [chunk for completion in output.outputs for chunk in _whole(request.request_id, completion)]
        receipt = None if request.make_receipt is None else request.make_receipt(output)
        chunks[-1] = structs.replace(chunks[-1], usage=usage, receipt=receipt)
        self.close(request, "finished")
        for chunk in chunks:
            self._connections.add_chunk(request.client, chunk)


def _whole(request_id: str, completion: CompletionOutput) -> list[Chunk]:
    """Return a finished completion as chunks; the last ones have the text."""
    ids, chunks = completion.token_ids, []
    most = max(map(len, completion.logprobs or ()), default=1)
    count = max(1, min(MAX_CHUNK_TOKENS, MAX_CHUNK_LOGPROBS // most))
    starts = range(0, len(ids), count) or range(1)
    for start in starts:
        end = start + count
        text, logprobs, offsets = "", None, None
        if completion.logprobs is not None and completion.text_offsets is not None:
            logprobs = [_logprobs(entry) for entry in completion.logprobs[start:end]]
            offsets = completion.text_offsets[start:end]
        if start == starts[-1]:
            text = completion.text
            while len(text) > MAX_TEXT:
                chunks.append(Chunk(request_id, completion.index, start, text[:MAX_TEXT], []))
                text = text[MAX_TEXT:]
        chunks.append(
            Chunk(request_id, completion.index, start, text, ids[start:end], logprobs=logprobs, text_offsets=offsets)
        )
    chunks[-1] = structs.replace(
        chunks[-1],
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        versions=completion.versions or None,
    )
    return chunks


def _chunk(request_id: str, first: int, delta: Delta) -> Chunk:
    scored = delta.logprobs is not None
    return Chunk(
        request_id,
        delta.index,
        first,
        delta.text,
        delta.token_ids,
        delta.finish_reason,  # type: ignore[arg-type]
        delta.stop_reason,
        [_logprobs(delta.logprobs or {})] if scored else None,
        text_offsets=[delta.text_offset] if scored else None,
        versions=delta.versions,
    )


def _parts(scores: list[list[TokenLogprob]]) -> Iterator[list[list[TokenLogprob]]]:
    """Yield the log-probabilities of consecutive tokens in parts that a chunk holds."""
    count = max(1, MAX_CHUNK_LOGPROBS // max(map(len, scores), default=1))
    return (scores[start : start + count] for start in range(0, len(scores), count))


def _logprobs(entry: dict[int, Logprob]) -> list[TokenLogprob]:
    return [TokenLogprob(token, value.logprob, value.rank, value.token_bytes) for token, value in entry.items()]
