"""/v1/responses: handlers, and events of a stream."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from ....protocol.messages import Chunk
from ...interfaces import GatewayError
from ..chat.endpoint import open_chat
from ..completion_session import CompletionResult, CompletionSession, TokenCounts
from ..context import GatewayContext, caller_of, json_response, new_id, renamed_fields
from ..event_stream import EventStream, named_event
from .builder import Event, OutputBuilder
from .output import RawMessage, Response, ResponseError, final_response, initial_response
from .request import ResponseRequest
from .store import ResponseStore, StoredResponse

_FIELDS = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Fields of a chat -> fields of a response that set them."""


async def responses(context: GatewayContext, store: ResponseStore, request: Request) -> HttpResponse:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, ResponseRequest)
    stores, owner = store.stores(body), caller_of(request).owner
    messages = store.conversation(owner, body)
    with renamed_fields(_FIELDS):
        chat = await open_chat(context, request, body.as_chat(messages))
    session, (message,) = chat.session, chat.messages
    session.constraint_field = _FIELDS.get(session.constraint_field, session.constraint_field)
    params = session.params
    initial = initial_response(
        body, new_id("resp"), int(time.time()), chat.target.name, params.temperature, params.top_p, stores
    )
    if chat.prompt_ids is not None:
        try:
            detokenize = functools.partial(context.engines.detokenize, chat.prompt_ids)
            text = await context.in_tokenizing_turn(request, detokenize)
        except BaseException:
            await session.close()
            raise
        initial = structs.replace(initial, input_messages=[RawMessage(message=text, tokens=chat.prompt_ids)])
    builder = OutputBuilder(message.parser, body.top_logprobs or 0)
    stored = StoredResponse(owner, initial, messages)

    def finish(response: Response) -> None:
        if stores:
            stored.finish(response)
            store.add(stored)

    if body.stream:
        return EventStream(session, _ResponseFormatter(initial, builder, finish))
    if body.background:
        stored.session = session
        try:
            store.add(stored)
        except GatewayError:
            await session.close()
            raise
        stored.task = asyncio.create_task(_compute(stored, session, builder, finish))
        return json_response(initial, session.headers)
    (result,) = await session.results(request.receive)
    response = _whole(initial, builder, result, session.counts)
    finish(response)
    return json_response(response, session.headers)


def _whole(initial: Response, builder: OutputBuilder, result: CompletionResult, counts: TokenCounts) -> Response:
    cut_off = result.finish_reason == "length"
    builder.push(result.text, True, result.token_ids, result.logprobs)
    builder.finish(cut_off)
    return final_response(initial, builder.output, builder.raw, cut_off, counts)


async def _compute(
    stored: StoredResponse, session: CompletionSession, builder: OutputBuilder, finish: Callable[[Response], None]
) -> None:
    """Compute a response in the background."""
    initial = stored.response = structs.replace(stored.response, status="in_progress")
    try:
        (result,) = await session.results()
        response = _whole(initial, builder, result, session.counts)
    except GatewayError as problem:
        response = _failed(initial, problem)
    finish(response)


def _failed(initial: Response, problem: GatewayError) -> Response:
    error = ResponseError(code=problem.code or "server_error", message=problem.message)
    return structs.replace(initial, status="failed", error=error)


class _ResponseFormatter:
    """Formats the numbered events of one answer. `finish`: is called with the complete response."""

    def __init__(self, initial: Response, builder: OutputBuilder, finish: Callable[[Response], None]) -> None:
        self._initial, self._builder, self._finish = initial, builder, finish
        self._num_events = 0
        self._cut_off = False
        kinds = ("response.created", "response.in_progress")
        self._first_events = self._encoded((kind, {"response": initial}) for kind in kinds)

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        return [self._event(kind, **fields) for kind, fields in events]

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        events, self._first_events = self._first_events, []
        for chunk in chunks:
            last = chunk.finish_reason is not None
            self._cut_off |= chunk.finish_reason == "length"
            events += self._encoded(self._builder.push(chunk.text, last, chunk.token_ids, chunk.logprobs))
        return events

    def format_end(self, counts: TokenCounts) -> list[bytes]:
        events = self._encoded(self._builder.finish(self._cut_off))
        builder = self._builder
        response = final_response(self._initial, builder.output, builder.raw, self._cut_off, counts)
        self._finish(response)
        return [*events, self._event(f"response.{response.status}", response=response)]

    def format_error(self, problem: GatewayError) -> bytes:
        return self._event("response.failed", response=_failed(self._initial, problem))


def _stored(context: GatewayContext, store: ResponseStore, request: Request) -> StoredResponse:
    """Count a request, and return the response that its path names. Raises GatewayError 404."""
    caller = caller_of(request)
    context.admission.count(caller, uses_tokens=False)
    return store.get(caller.owner, request.path_params["response"])


async def retrieve(context: GatewayContext, store: ResponseStore, request: Request) -> HttpResponse:
    """Return a stored response."""
    stored = _stored(context, store, request)
    if request.query_params.get("stream", "false").lower() in ("true", "1"):
        text = "a stored response has no stream; retrieve it without stream until its status is completed"
        raise GatewayError(400, text, code="unsupported_parameter", param="stream")
    return json_response(stored.response)


async def delete(context: GatewayContext, store: ResponseStore, request: Request) -> HttpResponse:
    """Delete a stored response. One in the background is cancelled first."""
    stored = _stored(context, store, request)
    await stored.cancel()
    store.remove(stored)
    return json_response({"id": stored.response.id, "object": "response.deleted", "deleted": True})


async def cancel(context: GatewayContext, store: ResponseStore, request: Request) -> HttpResponse:
    """Cancel a response in the background, and return it. A complete one is returned as it is."""
    stored = _stored(context, store, request)
    if stored.session is None:
        text = "Cannot cancel a synchronous response. Close its connection, or create it with background=true"
        raise GatewayError(400, text, param="response_id")
    if stored.is_open:
        await stored.cancel()
        store.get(stored.owner, stored.response.id)  # it may have been deleted meanwhile
        store.add(stored)
    return json_response(stored.response)


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints, with a store of their own."""
    store = ResponseStore(context.settings.store_responses)
    return [
        Route(path, functools.partial(handler, context, store), methods=[method])
        for path, method, handler in (
            ("/v1/responses", "POST", responses),
            ("/v1/responses/{response}", "GET", retrieve),
            ("/v1/responses/{response}", "DELETE", delete),
            ("/v1/responses/{response}/cancel", "POST", cancel),
        )
    ]
