"""The requests that are not finished yet: whose they are, and the chunks that their progress becomes."""

import time
from dataclasses import dataclass, field

from msgspec import structs

from ..api.outputs import CompletionOutput, Logprob, RequestOutput
from ..api.request import Delta
from ..protocol.messages import MAX_CHUNK_TOKENS, Chunk, Error, ErrorCode, TokenLogprob, Usage
from ..scheduler.token_masks import NOTHING_LEFT
from ..text.structured.trial import is_refusal
from .connections import Client, Connections

MAX_TEXT = 1 << 18
"""Characters of a chunk: a frame holds them in any alphabet."""


@dataclass(eq=False)
class OpenRequest:
    """One request of one connection.

    key              its id in the engine
    adapter_content  the version of its adapter with which the engine has it
    sent             tokens of each completion that went out
    admitted         the engine has it
    scored           log-probabilities of prompt tokens that went out; `scored_here`: that the present GPU process sent
    """

    key: str
    request_id: str
    client: Client
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

    def usage(self, output_tokens: int, output: RequestOutput | None = None) -> Usage:
        """What it cost."""
        first = self.first_token - self.arrived if self.first_token else 0.0
        usage = Usage(self.prompt_tokens, output_tokens, 0, first, time.monotonic() - self.arrived)
        if output is None:
            return usage
        return structs.replace(
            usage,
            cached_tokens=output.num_cached_tokens,
            draft_tokens=output.num_draft_tokens,
            accepted_tokens=output.num_accepted_tokens,
            history_draft_tokens=output.num_history_draft_tokens,
            history_accepted_tokens=output.num_history_accepted_tokens,
            trained_draft_tokens=output.num_trained_draft_tokens,
            trained_accepted_tokens=output.num_trained_accepted_tokens,
        )


class OpenRequests:
    """All of them, by engine id."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._open: dict[str, OpenRequest] = {}
        self._begun = 0
        self.counts = {
            "requests_total": 0,
            "finished_total": 0,
            "aborted_total": 0,
            "failed_total": 0,
            "refused_total": 0,
        }

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[OpenRequest]:
        """Every one, in the order in which they came."""
        return list(self._open.values())

    def get(self, key: str) -> OpenRequest | None:
        """The open request with this engine id."""
        return self._open.get(key)

    def begin(self, client: Client, request_id: str, stream: bool, adapter: str | None = None) -> OpenRequest:
        """A new request; its id must not be open on the connection."""
        # a client may use an id again while work for its former bearer is still under way
        self._begun += 1
        request = OpenRequest(
            f"{client.number}:{request_id}:{self._begun}", request_id, client, stream, time.monotonic(), adapter
        )
        self._open[request.key] = request
        client.open[request_id] = request.key
        self.counts["requests_total"] += 1
        return request

    def close(self, request: OpenRequest, how: str) -> None:
        """It is over; `how` names the counter."""
        self._open.pop(request.key, None)
        request.client.open.pop(request.request_id, None)
        self.counts[f"{how}_total"] += 1

    def refuse(
        self, request: OpenRequest, code: ErrorCode, message: str, retry_after: float | None = None, how: str = "failed"
    ) -> None:
        """It ends with an error."""
        self.close(request, how)
        if not request.client.gone:
            self._connections.say(request.client, Error(code, message, request.request_id, retry_after=retry_after))

    def aborted(self, request: OpenRequest) -> None:
        """It ends with an `abort` chunk."""
        self.close(request, "aborted")
        sent = sum(request.sent.values())
        self._connections.add(
            request.client,
            Chunk(request.request_id, 0, request.sent.get(0, 0), "", [], "abort", usage=request.usage(sent)),
        )

    def progress(self, deltas: list[Delta], finished: list[RequestOutput]) -> None:
        """Send what a step brought."""
        now = time.monotonic()
        ends = {output.request_id: output for output in finished}
        last: dict[str, Delta] = {}
        if ends:
            last = {delta.request_id: delta for delta in deltas if delta.request_id in ends}
        add, opened = self._connections.add, self._open
        for delta in deltas:
            request = opened.get(delta.request_id)
            if request is None:
                continue
            if delta.prompt_logprobs is not None:
                begin = request.scored_here
                request.scored_here += len(delta.prompt_logprobs)
                scores = list(map(_logprobs, delta.prompt_logprobs[max(0, request.scored - begin) :]))
                request.scored = max(request.scored, request.scored_here)
                if scores:
                    add(request.client, Chunk(request.request_id, delta.index, 0, "", [], prompt_logprobs=scores))
                continue
            if not request.first_token:
                request.first_token = now
            index, token_ids = delta.index, delta.token_ids
            first = request.sent.get(index, 0)
            request.sent[index] = first + len(token_ids)
            reason, stop_reason = delta.finish_reason, delta.stop_reason
            if reason is not None and last.get(delta.request_id) is delta:
                self._finish(request, ends.pop(delta.request_id), [delta])
                continue
            if reason in ("timeout", "error"):  # told once, when the last of its completions ends
                continue
            chunk = Chunk(request.request_id, index, first, delta.text, token_ids, reason, stop_reason)  # type: ignore[arg-type]
            add(request.client, chunk if delta.logprobs is None else _with_logprobs(chunk, delta))
        for output in ends.values():
            request = opened.get(output.request_id)
            if request is not None:
                self._finish(request, output, [])

    def _finish(self, request: OpenRequest, output: RequestOutput, deltas: list[Delta]) -> None:
        failed = next(
            (completion for completion in output.outputs if completion.finish_reason in ("timeout", "error")), None
        )
        if failed is not None:
            reason = str(failed.stop_reason)[:4096]
            fault: ErrorCode = "invalid_request" if is_refusal(reason) or reason == NOTHING_LEFT else "request_failed"
            self.refuse(request, "deadline_exceeded" if failed.finish_reason == "timeout" else fault, reason)
            return
        if not request.first_token:
            request.first_token = time.monotonic()
        usage = request.usage(sum(len(completion.token_ids) for completion in output.outputs), output)
        if request.stream:
            (delta,) = deltas
            sent = request.sent[delta.index] - len(delta.token_ids)
            chunk = Chunk(
                request.request_id,
                delta.index,
                sent,
                delta.text,
                delta.token_ids,
                delta.finish_reason,  # type: ignore[arg-type]
                delta.stop_reason,
                usage=usage,
            )
            chunks = [chunk if delta.logprobs is None else _with_logprobs(chunk, delta)]
        else:
            chunks = [chunk for completion in output.outputs for chunk in _whole(request.request_id, completion)]
            chunks[-1] = structs.replace(chunks[-1], usage=usage)
        self.close(request, "finished")
        for chunk in chunks:
            self._connections.add(request.client, chunk)


def _whole(request_id: str, completion: CompletionOutput) -> list[Chunk]:
    """A finished completion as chunks; the text comes with the last."""
    ids, chunks = completion.token_ids, []
    starts = range(0, len(ids), MAX_CHUNK_TOKENS) or range(1)
    for start in starts:
        part = ids[start : start + MAX_CHUNK_TOKENS]
        logprobs = offsets = None
        if completion.logprobs is not None and completion.text_offsets is not None:
            logprobs = [_logprobs(entry) for entry in completion.logprobs[start : start + MAX_CHUNK_TOKENS]]
            offsets = completion.text_offsets[start : start + MAX_CHUNK_TOKENS]
        if start == starts[-1]:
            text = completion.text
            while len(text) > MAX_TEXT:
                chunks.append(Chunk(request_id, completion.index, start, text[:MAX_TEXT], []))
                text = text[MAX_TEXT:]
            chunks.append(
                Chunk(
                    request_id,
                    completion.index,
                    start,
                    text,
                    part,
                    completion.finish_reason,  # type: ignore[arg-type]
                    completion.stop_reason,
                    logprobs,
                    text_offsets=offsets,
                )
            )
        else:
            chunks.append(Chunk(request_id, completion.index, start, "", part, logprobs=logprobs, text_offsets=offsets))
    return chunks


def _with_logprobs(chunk: Chunk, delta: Delta) -> Chunk:
    return structs.replace(chunk, logprobs=[_logprobs(delta.logprobs or {})], text_offsets=[delta.text_offset])


def _logprobs(entry: dict[int, Logprob]) -> list[TokenLogprob]:
    return [TokenLogprob(token, value.logprob, value.rank, value.token_bytes) for token, value in entry.items()]
