"""/v1/responses: handler, and events of a stream."""

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from ....protocol.messages import Chunk
from ...interfaces import GatewayError
from ..chat import open_chat
from ..completion_session import TokenCounts
from ..context import GatewayContext, caller_of, json_response, new_id, renamed_fields
from ..event_stream import EventStream, named_event
from .builder import Event, OutputBuilder
from .output import Response, ResponseError, final_response, initial_response
from .request import ResponseRequest

_FIELDS = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Fields of a chat -> fields of a response that set them."""


async def responses(context: GatewayContext, request: Request) -> HttpResponse:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, ResponseRequest)
    with renamed_fields(_FIELDS):
        chat = await open_chat(context, request, body.as_chat())
    session, (message,) = chat.session, chat.messages
    session.constraint_field = _FIELDS.get(session.constraint_field, session.constraint_field)
    params = session.params
    initial = initial_response(
        body, new_id("resp"), int(time.time()), chat.target.name, params.temperature, params.top_p
    )
    builder = OutputBuilder(message.parser, body.top_logprobs or 0)
    if body.stream:
        return EventStream(session, _ResponseFormatter(initial, builder))
    (result,) = await session.results(request.receive)
    cut_off = result.finish_reason == "length"
    builder.push(result.text, True, result.token_ids, result.logprobs)
    builder.finish(cut_off)
    return json_response(final_response(initial, builder.output, cut_off, session.counts), session.headers)


class _ResponseFormatter:
    """Formats the numbered events of one answer."""

    def __init__(self, initial: Response, builder: OutputBuilder) -> None:
        self._initial, self._builder = initial, builder
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
        response = final_response(self._initial, self._builder.output, self._cut_off, counts)
        return [*events, self._event(f"response.{response.status}", response=response)]

    def format_error(self, problem: GatewayError) -> bytes:
        error = ResponseError(code=problem.code or "server_error", message=problem.message)
        return self._event("response.failed", response=structs.replace(self._initial, status="failed", error=error))


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    return [Route("/v1/responses", functools.partial(responses, context), methods=["POST"])]
