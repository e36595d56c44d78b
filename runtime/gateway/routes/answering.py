"""One request for tokens: from admission, through its chunks, to its one usage record."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from starlette.requests import Request

from ...api.sampling_params import SamplingParams
from ...protocol.messages import Chunk
from ..contracts import Caller, EngineRequest, Exchange, GatewayError, Ticket, UsageRecord
from ..shapes.common import CompletionTokensDetails, PromptTokensDetails, Usage
from ..shapes.constraints import told_of
from .desk import Desk, Target, caller_of, request_id_of
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
    version that it answers with; `ended`: prompts whose answers are complete.
    """

    prompts: dict[int, int] = field(default_factory=dict)
    output_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    history_draft_tokens: int = 0
    history_accepted_tokens: int = 0
    trained_draft_tokens: int = 0
    trained_accepted_tokens: int = 0
    adapter_content: str = ""
    first_token_seconds: float = 0.0
    engine_first_token_seconds: float = 0.0
    engine_total_seconds: float = 0.0
    ended: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, also those whose answers nobody waited for."""
        return sum(self.prompts.values())

    def accepted(self, place: int, prompt_tokens: int, adapter_content: str) -> None:
        """An engine has taken a prompt."""
        self.prompts[place], self.adapter_content = prompt_tokens, adapter_content

    def add(self, place: int, chunks: list[Chunk]) -> bool:
        """Chunks of the answer to one prompt; whether the engine gave it up."""
        aborted = False
        for chunk in chunks:
            self.output_tokens += len(chunk.token_ids)
            aborted |= chunk.finish_reason == "abort"
            if chunk.usage is not None:
                self.ended += 1
                self.prompts[place] = chunk.usage.prompt_tokens
                self.cached_tokens += chunk.usage.cached_tokens
                self.draft_tokens += chunk.usage.draft_tokens
                self.accepted_tokens += chunk.usage.accepted_tokens
                self.history_draft_tokens += chunk.usage.history_draft_tokens
                self.history_accepted_tokens += chunk.usage.history_accepted_tokens
                self.trained_draft_tokens += chunk.usage.trained_draft_tokens
                self.trained_accepted_tokens += chunk.usage.trained_accepted_tokens
                self.engine_first_token_seconds = chunk.usage.first_token_seconds
                self.engine_total_seconds = max(self.engine_total_seconds, chunk.usage.total_seconds)
        return aborted

    def usage(self) -> Usage:
        """As answers tell it."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.prompt_tokens + self.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=self.accepted_tokens,
                rejected_prediction_tokens=self.draft_tokens - self.accepted_tokens,
            ),
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
        self._heard = [self._started] * len(exchange.prompts)  # when the last chunk of each answer arrived

    @property
    def complete(self) -> bool:
        """Whether all that there is of the answers has arrived."""
        return self.counts.ended == len(self._exchange.prompts)

    def pieces(self, direct: Callable[[Chunk], bool] | None = None) -> Pieces:
        """What arrives. Raises GatewayError, for whatever goes wrong at an engine.

        `direct` is offered chunks from the middle of the answer to a single prompt, see `EngineRequest`: those that it
        takes are counted here and are in no piece.
        """
        self._pieces = self._arrivals(direct if len(self._exchange.prompts) == 1 else None)
        return self._pieces

    async def _arrivals(self, direct: Callable[[Chunk], bool] | None) -> Pieces:
        counts, status, error = self.counts, CLIENT_GONE, "client_gone"
        streams = [self._desk.engines.stream(request) for request in self._requests(direct)]
        arriving: AsyncGenerator[Any, None] = streams[0] if len(streams) == 1 else _merged(streams)
        try:
            async with aclosing(arriving):
                async for arrived in arriving:
                    place, chunks = (0, arrived) if len(streams) == 1 else arrived
                    if not counts.first_token_seconds and any(chunk.token_ids for chunk in chunks):
                        self._first(chunks)
                    self._observe(place, chunks)
                    if counts.add(place, chunks):
                        raise GatewayError(
                            503, "the engine was stopped", "server_error", "engine_stopped", retry_after=1.0
                        )
                    if self.complete:
                        self._record(200, "")
                    yield place, chunks
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

    async def close(self) -> None:
        """The answer is sent, or nobody wants it any more: aborts what is open."""
        if self._pieces is not None:
            await self._pieces.aclose()
        self._record(CLIENT_GONE, "client_gone")

    def _observe(self, place: int, chunks: list[Chunk]) -> None:
        now = time.monotonic()
        self._desk.observer.arrived(self._exchange, place, chunks, now - self._heard[place])
        self._heard[place] = now

    def _counted(self, direct: Callable[[Chunk], bool], chunk: Chunk) -> bool:
        """Offer a chunk to `direct`, and count it if it was taken."""
        if not direct(chunk):
            return False
        self._observe(0, [chunk])
        self.counts.output_tokens += len(chunk.token_ids)
        return True

    def _requests(self, direct: Callable[[Chunk], bool] | None) -> list[EngineRequest]:
        exchange = self._exchange
        number = next(self._desk.numbers)  # several clients may have chosen one id
        owner = _owner_tag(exchange.caller, exchange.client_host)
        return [
            EngineRequest(
                f"{exchange.request_id[:32]}-{number}-{place}",
                prompt,
                exchange.params,
                exchange.adapter,
                owner,
                self._priority,
                self._deadline,
                exchange.stream,
                functools.partial(self.counts.accepted, place),
                exchange.add_special_tokens,
                None if direct is None else functools.partial(self._counted, direct),
            )
            for place, prompt in enumerate(exchange.prompts)
        ]

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
            draft_tokens=counts.draft_tokens,
            accepted_tokens=counts.accepted_tokens,
            history_draft_tokens=counts.history_draft_tokens,
            history_accepted_tokens=counts.history_accepted_tokens,
            trained_draft_tokens=counts.trained_draft_tokens,
            trained_accepted_tokens=counts.trained_accepted_tokens,
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
        headers={
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.scope["headers"]
            if name != b"authorization"
        },
        add_special_tokens=add_special_tokens,
    )
    desk.observer.begun(exchange)
    return Answering(desk, exchange, ticket, target, priority or 0, deadline_seconds)


def _owner_tag(caller: Caller, client_host: str) -> str:
    """For whom engines share their steps and places fairly: the key's owner, or where there are no keys the client's
    address. They need no names, so it is hashed, and equal in all gateways.
    """
    whose = caller.owner if caller.key_id else f"{caller.owner}\n{client_host}"
    return blake2b(whose.encode(), digest_size=8).hexdigest()


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
