"""A request that generates tokens: admission, the chunks of its answers, and its usage record."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.types import Receive

from ...api.beam_search import BeamSearchParams
from ...api.sampling_params import DEFAULT_MAX_LOGPROBS, SamplingParams
from ...protocol.messages import Chunk, TokenLogprob
from ...text.reasoning import ReasoningParser
from ...text.scoring import ScoreRequest
from ..intake.body_memory import BODY
from ..interfaces import KEY_HEADERS, AdmittedRequest, EngineRequest, GatewayError, Ticket, UsageRecord
from ..metrics.load_report import FORMAT_HEADER, load_report
from .beam_search import search
from .body_types import CompletionTokensDetails, MetricsField, PromptTokensDetails, ReceiptField, RequestMetrics, Usage
from .context import MODEL, GatewayContext, Target, caller_of, owner_tag, request_id_of
from .errors import CLIENT_GONE, to_gateway_error
from .request_body import while_connected
from .response_format import name_constraint_field

Prompt = str | list[int]
PromptChunks = tuple[int, list[Chunk]]
"""(index of a prompt, chunks of its answer that arrived together)."""
ChunkStream = AsyncGenerator[PromptChunks, None]
CHARACTERS_PER_TOKEN = 4
MAX_QUEUED_LISTS = 256
_SUMMED = (
    "draft_tokens",
    "accepted_tokens",
    "history_draft_tokens",
    "history_accepted_tokens",
    "trained_draft_tokens",
    "trained_accepted_tokens",
    "preemptions",
)
"""Counts that an answer's prompts add up to, by their names in Usage and UsageRecord."""


@dataclass
class TokenCounts:
    """Counts over the chunks that arrived.

    by_prompt         prompt index -> its number of tokens, once an engine accepted it
    adapter_active    no prompt lacks the invocation of the aLoRA adapter
    adapter_content   content hash of the adapter version that answers
    finished_prompts  prompts with complete answers
    reasoning         parsers of the answers' reasoning, which count its tokens
    receipts          prompt index -> receipt of its answer
    reports_metrics   whether the response has `metrics`
    counts_chunks     the tokens of chunks are output; False: a beam search counts those of its steps
    """

    by_prompt: dict[int, int] = field(default_factory=dict)
    output_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    history_draft_tokens: int = 0
    history_accepted_tokens: int = 0
    trained_draft_tokens: int = 0
    trained_accepted_tokens: int = 0
    preemptions: int = 0
    adapter_active: bool = True
    adapter_content: str = ""
    first_token_seconds: float = 0.0
    longest_output_tokens: int = 0
    engine_queue_seconds: float = 0.0
    engine_first_token_seconds: float = 0.0
    engine_total_seconds: float = 0.0
    finished_prompts: int = 0
    reasoning: list[ReasoningParser] = field(default_factory=list)
    receipts: dict[int, dict[str, Any]] = field(default_factory=dict)
    reports_metrics: bool = False
    counts_chunks: bool = True

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all answers."""
        return sum(parser.num_tokens for parser in self.reasoning)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all accepted prompts."""
        return sum(self.by_prompt.values())

    def accept(self, prompt_index: int, prompt_tokens: int, adapter_content: str) -> None:
        """Record that an engine accepted a prompt."""
        self.by_prompt[prompt_index], self.adapter_content = prompt_tokens, adapter_content

    def add(self, prompt_index: int, chunks: list[Chunk]) -> bool:
        """Count chunks of one prompt's answer. Returns whether the engine aborted it."""
        aborted = False
        for chunk in chunks:
            self.output_tokens += len(chunk.token_ids) * self.counts_chunks
            if chunk.finish_reason is not None:
                aborted |= chunk.finish_reason == "abort"
                self.longest_output_tokens = max(self.longest_output_tokens, chunk.first + len(chunk.token_ids))
            usage = chunk.usage
            if usage is not None:
                self.finished_prompts += 1
                if chunk.receipt is not None:
                    self.receipts[prompt_index] = chunk.receipt
                self.by_prompt[prompt_index] = usage.prompt_tokens
                for name in ("cached_tokens", *_SUMMED):
                    setattr(self, name, getattr(self, name) + getattr(usage, name))
                self.adapter_active &= usage.adapter_active
                self.engine_queue_seconds = usage.queue_seconds
                self.engine_first_token_seconds = usage.first_token_seconds
                self.engine_total_seconds = max(self.engine_total_seconds, usage.total_seconds)
        return aborted

    @property
    def receipt(self) -> ReceiptField:
        """The receipt of the answer, or the list of those of several prompts, if there are any."""
        receipts = [self.receipts[index] for index in sorted(self.receipts)]
        return UNSET if not receipts else receipts[0] if len(receipts) == 1 else receipts

    @property
    def metrics(self) -> MetricsField:
        """The engine's times of the answer, if the response has them."""
        if not self.reports_metrics:
            return UNSET
        queue, first, total = self.engine_queue_seconds, self.engine_first_token_seconds, self.engine_total_seconds
        computing, generating, tokens = total - queue, total - first, self.output_tokens
        return RequestMetrics(
            time_to_first_token_ms=1000 * (first - queue),
            generation_time_ms=1000 * generating,
            queue_time_ms=1000 * queue,
            mean_itl_ms=1000 * generating / (tokens - 1) if tokens > 1 else UNSET,
            tokens_per_second=tokens / computing if computing > 0 else UNSET,
        )

    def usage(self) -> Usage:
        """Return the counts as a response reports them."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.prompt_tokens + self.output_tokens,
            adapter_active=UNSET if self.adapter_active else False,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self.reasoning_tokens,
                accepted_prediction_tokens=self.accepted_tokens,
                rejected_prediction_tokens=self.draft_tokens - self.accepted_tokens,
            ),
        )


@dataclass
class CompletionResult:
    """One completion, accumulated from its chunks.

    text_offsets      for each token in `logprobs`, the index of its first character in `text`
    prompt_logprobs   of the prompt's tokens from the second on
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs
            self.text_offsets += chunk.text_offsets or []
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs += chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


class CompletionSession:
    """The prompts of one admitted request, and the chunks of their answers.

    `close` must be called at the end, also after errors. The usage record is written once.
    """

    def __init__(
        self,
        context: GatewayContext,
        request: AdmittedRequest,
        ticket: Ticket,
        target: Target,
        owner: str,
        priority: int,
        deadline: float | None,
    ) -> None:
        self._context, self._request, self._ticket, self._target = context, request, ticket, target
        self._owner = owner
        self._priority, self._deadline = priority, deadline
        is_single = len(request.prompts) * request.params.n == 1
        self.counts = TokenCounts(reports_metrics=is_single and context.settings.per_request_metrics)
        self.headers = dict(ticket.headers)
        if FORMAT_HEADER in request.headers and request.caller.metrics:  # the load is that of all owners
            self.headers |= load_report(request.headers[FORMAT_HEADER], context.engines.last_stats())
        self.keepalive_seconds = context.settings.stream_keepalive_seconds
        self.constraint_field = "structured_outputs"  # the field of the body that sets a constraint
        self.scores_only = False  # drop generated tokens
        self.beams: BeamSearchParams | None = None  # of a beam search
        self._started = time.monotonic()
        self._recorded = False
        context.open_requests += 1
        self._stream: ChunkStream | None = None
        self._last_arrivals = [self._started] * len(request.prompts)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, with the limits of the key."""
        return self._request.params

    @property
    def complete(self) -> bool:
        """Whether all answers have arrived."""
        return self.counts.finished_prompts == len(self._request.prompts)

    @property
    def accepted(self) -> bool:
        """Whether an engine accepted each prompt: what is wrong with the request itself is known."""
        return len(self.counts.by_prompt) == len(self._request.prompts)

    def stream(self, direct: Callable[[Chunk], bool] | None = None) -> ChunkStream:
        """Yield chunks as they arrive. Raises GatewayError for any error of an engine.

        `direct` is called with chunks from the middle of the answer to a single prompt, see `EngineRequest`. Chunks
        for which it returns True are counted, but not yielded.
        """
        self._stream = self._arrivals(direct if len(self._request.prompts) == 1 else None)
        return self._stream

    async def results(self, receive: Receive | None = None) -> list[CompletionResult]:
        """Return all completions, those of the first prompt first, and close the session after an error.

        receive   of the HTTP request: raises ClientDisconnect if the client disconnects. None: no client waits
        """
        try:
            return await (self._collect() if receive is None else while_connected(receive, self._collect()))
        except BaseException:
            await self.close()
            raise

    async def _collect(self) -> list[CompletionResult]:
        n = self._request.params.n
        results = [CompletionResult() for _ in range(len(self._request.prompts) * n)]
        async with aclosing(self.stream()) as stream:
            async for prompt_index, chunks in stream:
                for chunk in chunks:
                    results[prompt_index * n + chunk.index].add(chunk)
        return results

    async def _arrivals(self, direct: Callable[[Chunk], bool] | None) -> ChunkStream:
        counts, status, error = self.counts, CLIENT_GONE, "client_gone"
        streams = [self._open(request) for request in self._engine_requests(direct)]
        arriving: AsyncGenerator[Any, None] = streams[0] if len(streams) == 1 else _merge(streams)
        try:
            async with aclosing(arriving):
                async for item in arriving:
                    prompt_index, chunks = (0, item) if len(streams) == 1 else item
                    if self.scores_only:
                        chunks = list(map(_without_output, chunks))
                    if not counts.first_token_seconds and any(chunk.token_ids for chunk in chunks):
                        self._on_first_token(chunks)
                    self._observe(prompt_index, chunks)
                    if counts.add(prompt_index, chunks):
                        raise GatewayError(
                            503, "the engine was stopped", "server_error", "engine_stopped", retry_after=1.0
                        )
                    if self.complete:
                        self._record(200, "")
                    yield prompt_index, chunks
        except Exception as exception:
            problem = to_gateway_error(exception)
            if problem.param == "structured_outputs":
                message = name_constraint_field(self.constraint_field, problem.message)
                problem = GatewayError(problem.status, message, problem.kind, problem.code, self.constraint_field)
            status, error = problem.status, problem.code or problem.kind
            raise problem from None
        finally:
            self._record(status, error)

    def _open(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        engines = self._context.engines
        if self.beams is None:
            return engines.stream(request)
        self.counts.counts_chunks = False
        return search(engines, self.beams, self._target.model, self._count_step, request)

    def _count_step(self, tokens: int) -> None:
        self.counts.output_tokens += tokens

    async def close(self) -> None:
        """End the session, and abort open requests."""
        if self._stream is not None:
            await self._stream.aclose()
        self._record(CLIENT_GONE, "client_gone")

    def _observe(self, prompt_index: int, chunks: list[Chunk]) -> None:
        now = time.monotonic()
        seconds = now - self._last_arrivals[prompt_index]
        self._context.observer.on_chunks(self._request, prompt_index, chunks, seconds)
        self._last_arrivals[prompt_index] = now

    def _count_direct(self, direct: Callable[[Chunk], bool], chunk: Chunk) -> bool:
        """Offer a chunk to `direct`, and count it if it was accepted."""
        if not direct(chunk):
            return False
        self._observe(0, [chunk])
        self.counts.output_tokens += len(chunk.token_ids)
        return True

    def _engine_requests(self, direct: Callable[[Chunk], bool] | None) -> list[EngineRequest]:
        request = self._request
        number = next(self._context.numbers)  # clients may choose the same request id
        # a whole answer with many of them exceeds what an engine queues for a connection
        many_logprobs = not -1 < (request.params.logprobs or 0) <= DEFAULT_MAX_LOGPROBS
        return [
            EngineRequest(
                f"{request.request_id[:32]}-{number}-{prompt_index}",
                prompt,
                request.scores[prompt_index].params if request.scores else request.params,
                request.adapter,
                self._owner,
                self._priority,
                self._deadline,
                request.stream or many_logprobs,
                functools.partial(self.counts.accept, prompt_index),
                request.add_special_tokens,
                None if direct is None else functools.partial(self._count_direct, direct),
                request.scores[prompt_index].scored if request.scores else (),
            )
            for prompt_index, prompt in enumerate(request.prompts)
        ]

    def _on_first_token(self, chunks: list[Chunk]) -> None:
        usage = chunks[-1].usage
        seconds = time.monotonic() - self._started
        if not self._request.stream and usage is not None:  # only the engine measured its first token
            seconds = min(seconds, usage.first_token_seconds)
        self.counts.first_token_seconds = max(seconds, 1e-9)
        self._context.observer.on_first_token(self._request, seconds)

    def _record(self, status: int, error: str) -> None:
        if self._recorded:
            return
        self._recorded = True
        self._context.open_requests -= 1
        request, counts, card = self._request, self.counts, self._target.adapter
        record = UsageRecord(
            time=request.started,
            request_id=request.request_id,
            endpoint=request.endpoint,
            owner=request.caller.owner,
            key_id=request.caller.key_id,
            model=self._target.model.name,
            adapter=request.adapter,
            adapter_content=counts.adapter_content or ("" if card is None else card.content),
            prompt_tokens=counts.prompt_tokens,
            output_tokens=counts.output_tokens,
            cached_tokens=counts.cached_tokens,
            first_token_seconds=counts.first_token_seconds,
            total_seconds=time.monotonic() - self._started,
            status=status,
            error=error,
            engine_first_token_seconds=counts.engine_first_token_seconds,
            engine_total_seconds=counts.engine_total_seconds,
            engine_queue_seconds=counts.engine_queue_seconds,
            longest_output_tokens=counts.longest_output_tokens,
            **{name: getattr(counts, name) for name in _SUMMED},
        )
        self._ticket.finish(record)
        self._context.observer.on_finished(request, record)


def estimated_tokens(value: Any) -> int:
    """Return the number of tokens of a prompt: exact for token ids, an estimate for a text or messages."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return len(value)
    return _characters(value) // CHARACTERS_PER_TOKEN + 1


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


@contextmanager
def reserved_tokens(
    context: GatewayContext, request: Request, target: Target, prompt_tokens: int, params: SamplingParams, choices: int
) -> Iterator[Ticket]:
    """Reserve the tokens of a request while the block makes its session. An error in the block returns them.

    Raises GatewayError 429.
    """
    request.scope[MODEL] = target.name
    ticket = context.admission.admit(
        caller_of(request), target.name, prompt_tokens, params.max_tokens, choices, target.model.max_model_len
    )
    try:
        yield ticket
    except BaseException:
        ticket.finish(None)
        raise


def open_session(
    context: GatewayContext,
    request: Request,
    ticket: Ticket,
    target: Target,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    stream: bool,
    priority: int | None = None,
    deadline_seconds: float | None = None,
    add_special_tokens: bool = True,
    scores: Sequence[ScoreRequest] = (),
) -> CompletionSession:
    """Return the session of a request with reserved tokens. `add_special_tokens` applies to text prompts; `scores` are
    the requests of the prompts for scores.
    """
    if ticket.max_tokens is not None and ticket.max_tokens != params.max_tokens:
        params = replace(params, max_tokens=ticket.max_tokens, min_tokens=min(params.min_tokens, ticket.max_tokens))
    admitted = AdmittedRequest(
        request_id=request_id_of(request),
        endpoint=request.scope["path"],
        caller=caller_of(request),
        client_host=request.client.host if request.client is not None else "",
        model=target.name,
        adapter=None if target.adapter is None else target.adapter.name,
        stream=stream,
        prompts=list(prompts),
        params=params,
        headers={
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.scope["headers"]
            if name not in KEY_HEADERS
        },
        add_special_tokens=add_special_tokens,
        scores=scores,
    )
    context.observer.on_admitted(admitted)
    request.scope[BODY].release()
    return CompletionSession(context, admitted, ticket, target, owner_tag(request), priority or 0, deadline_seconds)


def _without_output(chunk: Chunk) -> Chunk:
    """Return a chunk without generated tokens, with the finish reason of an answer without tokens."""
    reason: Any = "length" if chunk.finish_reason == "stop" else chunk.finish_reason
    dropped: dict[str, Any] = {"logprobs": chunk.logprobs and [], "text_offsets": chunk.text_offsets and []}
    return structs.replace(chunk, text="", token_ids=[], finish_reason=reason, stop_reason=None, **dropped)


async def _merge(streams: Sequence[AsyncGenerator[list[Chunk], None]]) -> ChunkStream:
    """Merge streams in the order in which their chunks arrive. The first error ends all."""
    queue: asyncio.Queue[tuple[int, list[Chunk] | Exception | None]] = asyncio.Queue(MAX_QUEUED_LISTS)

    async def pump(index: int, stream: AsyncGenerator[list[Chunk], None]) -> None:
        try:
            async with aclosing(stream):
                async for chunks in stream:
                    await queue.put((index, chunks))
            await queue.put((index, None))
        except Exception as problem:  # raised again by the consumer
            await queue.put((index, problem))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            index, item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
