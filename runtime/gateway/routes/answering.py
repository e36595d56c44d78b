"""One request for tokens: from admission, through its chunks, to its one usage record."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from ...requests.sampling_params import SamplingParams
from ...wire.protocol import Chunk
from ..contracts import EngineRequest, Exchange, GatewayError, Ticket, UsageRecord
from ..shapes.common import PromptTokensDetails, Usage
from ..shapes.constraints import told_of
from .desk import Desk, Target, caller_of, new_id, request_id_of
from .errors import CLIENT_GONE, as_gateway_error

Prompt = str | list[int]
Piece = tuple[int, list[Chunk]]
"""Which of the prompts, and chunks of its answer that arrived together."""
Pieces = AsyncGenerator[Piece, None]
CHARACTERS_PER_TOKEN = 4
MERGED_LISTS = 256


@dataclass
class Counts:
    """What has arrived. `prompts`: tokens of each prompt that an engine has taken; `adapter_content`: the adapter's
    version that it answers with.
    """

    prompts: dict[int, int] = field(default_factory=dict)
    output_tokens: int = 0
    cached_tokens: int = 0
    adapter_content: str = ""
    first_token_seconds: float = 0.0
    engine_first_token_seconds: float = 0.0
    engine_total_seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, also those whose answers nobody waited for."""
        return sum(self.prompts.values())

    def accepted(self, place: int, prompt_tokens: int, adapter_content: str) -> None:
        """An engine has taken a prompt."""
        self.prompts[place], self.adapter_content = prompt_tokens, adapter_content

    def add(self, place: int, chunks: list[Chunk]) -> None:
        """Chunks of the answer to one prompt."""
        for chunk in chunks:
            self.output_tokens += len(chunk.token_ids)
            if chunk.usage is not None:
                self.prompts[place] = chunk.usage.prompt_tokens
                self.cached_tokens += chunk.usage.cached_tokens
                self.engine_first_token_seconds = chunk.usage.first_token_seconds
                self.engine_total_seconds = max(self.engine_total_seconds, chunk.usage.total_seconds)

    def usage(self) -> Usage:
        """As answers tell it."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.prompt_tokens + self.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


class Answering:
    """Prompts that were let in, and what arrives of their answers.

    Whatever happens, `close` has to be called in the end; the usage record is written once.
    """

    def __init__(
        self, desk: Desk, exchange: Exchange, ticket: Ticket, target: Target, priority: int, deadline: float | None
    ) -> None:
        self._desk, self._exchange, self._ticket, self._target = desk, exchange, ticket, target
        self._priority, self._deadline = priority, deadline
        self.counts = Counts()
        self.headers = dict(ticket.headers)
        self.constrained_by = "structured_outputs"  # the field of the body that asks for a constraint
        self._started = time.monotonic()
        self._recorded = False
        self._pieces: Pieces | None = None

    async def pieces(self) -> Pieces:
        """Raises GatewayError, for whatever goes wrong at an engine."""
        counts, status, error = self.counts, CLIENT_GONE, "client_gone"
        before = [self._started] * len(self._exchange.prompts)
        observer = self._desk.observer
        lists = self._lists()
        try:
            async with aclosing(lists):
                async for place, chunks in lists:
                    if not counts.first_token_seconds and any(chunk.token_ids for chunk in chunks):
                        self._first(chunks)
                    now = time.monotonic()
                    observer.arrived(self._exchange, place, chunks, now - before[place])
                    before[place] = now
                    counts.add(place, chunks)
                    if any(chunk.finish_reason == "abort" for chunk in chunks):
                        raise GatewayError(
                            503, "the engine was stopped", "server_error", "engine_stopped", retry_after=1.0
                        )
                    yield place, chunks
            status, error = 200, ""
        except Exception as problem:
            told = as_gateway_error(problem)
            if told.param == "structured_outputs":
                told = GatewayError(
                    told.status, told_of(self.constrained_by, told.message), told.kind, told.code, self.constrained_by
                )
            status, error = told.status, told.code or told.kind
            raise told from None
        finally:
            self._record(status, error)

    async def first(self) -> Piece:
        """Wait for the first piece: what goes wrong before it is answered with a status of its own."""
        self._pieces = self.pieces()
        return await anext(self._pieces)

    async def all(self, first: Piece) -> Pieces:
        """The first piece and the ones after it."""
        yield first
        if self._pieces is not None:
            async for piece in self._pieces:
                yield piece

    async def close(self) -> None:
        """The answer is sent, or nobody wants it any more: aborts what is open."""
        if self._pieces is not None:
            await self._pieces.aclose()
        self._record(CLIENT_GONE, "client_gone")

    def _lists(self) -> Pieces:
        exchange = self._exchange
        requests = [
            EngineRequest(
                f"{exchange.request_id[:48]}-{new_id('')[-8:]}-{place}",
                prompt,
                exchange.params,
                exchange.adapter,
                exchange.caller.owner,
                self._priority,
                self._deadline,
                exchange.stream,
                functools.partial(self.counts.accepted, place),
                exchange.add_special_tokens,
            )
            for place, prompt in enumerate(exchange.prompts)
        ]
        if len(requests) == 1:
            return _numbered(self._desk.engines.stream(requests[0]))
        return _merged([self._desk.engines.stream(request) for request in requests])

    def _first(self, chunks: list[Chunk]) -> None:
        usage = chunks[-1].usage
        seconds = time.monotonic() - self._started
        if not self._exchange.stream and usage is not None:  # the answer came as a whole: the engine knows
            seconds = min(seconds, usage.first_token_seconds)
        self.counts.first_token_seconds = max(seconds, 1e-9)
        self._desk.observer.first_token(self._exchange, seconds)

    def _record(self, status: int, error: str) -> None:
        if self._recorded:
            return
        self._recorded = True
        exchange, counts, card = self._exchange, self.counts, self._target.adapter
        record = UsageRecord(
            time=exchange.started,
            request_id=exchange.request_id,
            endpoint=exchange.endpoint,
            owner=exchange.caller.owner,
            key_id=exchange.caller.key_id,
            model=self._target.model.name,
            adapter=exchange.adapter,
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
        )
        self._ticket.finish(record)
        self._desk.observer.finished(exchange, record)


def admit(
    desk: Desk,
    request: Request,
    target: Target,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    stream: bool,
    priority: int | None = None,
    deadline_seconds: float | None = None,
    add_special_tokens: bool = True,
) -> Answering:
    """Let a request in; `add_special_tokens`: to prompts that are text. Raises GatewayError 429."""
    caller = caller_of(request)
    estimate = sum(
        len(prompt) if isinstance(prompt, list) else len(prompt) // CHARACTERS_PER_TOKEN + 1 for prompt in prompts
    )
    choices = params.n * len(prompts)
    ticket = desk.admission.admit(caller, target.name, estimate, params.max_tokens, choices, target.model.max_model_len)
    if ticket.max_tokens is not None and ticket.max_tokens != params.max_tokens:
        params = replace(params, max_tokens=ticket.max_tokens, min_tokens=min(params.min_tokens, ticket.max_tokens))
    exchange = Exchange(
        request_id=request_id_of(request),
        endpoint=request.scope["path"],
        caller=caller,
        client_host=request.client.host if request.client is not None else "",
        model=target.name,
        adapter=None if target.adapter is None else target.adapter.name,
        stream=stream,
        prompts=list(prompts),
        params=params,
        headers={name: value for name, value in request.headers.items() if name != "authorization"},
        add_special_tokens=add_special_tokens,
    )
    desk.observer.begun(exchange)
    return Answering(desk, exchange, ticket, target, priority or 0, deadline_seconds)


async def _numbered(lists: AsyncGenerator[list[Chunk], None]) -> Pieces:
    async with aclosing(lists):
        async for chunks in lists:
            yield 0, chunks


async def _merged(streams: Sequence[AsyncGenerator[list[Chunk], None]]) -> Pieces:
    """Several streams as one, in the order in which their chunks arrive; the first error ends all."""
    queue: asyncio.Queue[tuple[int, list[Chunk] | Exception | None]] = asyncio.Queue(MERGED_LISTS)

    async def pump(place: int, lists: AsyncGenerator[list[Chunk], None]) -> None:
        try:
            async with aclosing(lists):
                async for chunks in lists:
                    await queue.put((place, chunks))
            await queue.put((place, None))
        except Exception as problem:  # raised again where the pieces are taken
            await queue.put((place, problem))

    tasks = [asyncio.create_task(pump(place, lists)) for place, lists in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            place, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
