"""/v1/responses: whole, or as the sequence of events that OpenAI's clients know."""

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from ...protocol.messages import Chunk
from ..contracts import GatewayError
from ..shapes.logprobs import ChatLogprob, chat_logprobs
from ..shapes.responses import (
    DeltaEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputMessage,
    OutputText,
    PartEvent,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseRequest,
    ResponseUsage,
    TextEvent,
)
from .answering import Counts, admit
from .bodies import read_body, while_connected
from .completions import Choice, whole
from .desk import Desk, caller_of, json_response, new_id
from .event_stream import EventStream
from .sse import named_event


class Responses:
    """The endpoint's handler."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def answer(self, request: Request) -> HttpResponse:
        """Answers one request."""
        desk = self._desk
        body = await read_body(request, ResponseRequest, desk.settings)
        target = await desk.target(caller_of(request), body.model)
        params = body.sampling(target.model.sampling_defaults)
        prompt = await desk.chat_prompt(await desk.templates(target), body.conversation_messages())
        stream, top = bool(body.stream), body.top_logprobs or 0
        answering = admit(desk, request, target, [prompt], params, stream, body.priority, add_special_tokens=False)
        answering.constrained_by = "text"
        begun = Response(
            id=new_id("resp"),
            created_at=int(time.time()),
            model=target.name,
            status="in_progress",
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            metadata=body.metadata or {},
            text=body.told_format(),
        )
        try:
            if stream:
                return EventStream(answering, _Events(begun, top))
            (choice,) = await while_connected(request.receive, whole(answering, 1, 1))
        except BaseException:
            await answering.close()
            raise
        return json_response(_complete(begun, new_id("msg"), choice, answering.counts, top), answering.headers)


def _complete(begun: Response, message_id: str, choice: Choice, counts: Counts, top: int) -> Response:
    cut = choice.finish_reason == "length"
    message = OutputMessage(
        id=message_id,
        status="incomplete" if cut else "completed",
        content=[OutputText(text=choice.text, logprobs=chat_logprobs(choice.places, top).content)],
    )
    return replace(
        begun,
        status="incomplete" if cut else "completed",
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
        output=[message],
        usage=ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.output_tokens,
            total_tokens=counts.prompt_tokens + counts.output_tokens,
        ),
    )


class _Events:
    """The events of one answer, numbered."""

    def __init__(self, begun: Response, top: int) -> None:
        self._begun, self._top = begun, top
        self._message_id = new_id("msg")
        self._number = -1
        self._choice, self._unsaid = Choice(), self._beginning()

    @property
    def _next(self) -> int:
        self._number += 1
        return self._number

    def _response(self, kind: str, response: Response) -> bytes:
        return _event(ResponseEvent(type=f"response.{kind}", sequence_number=self._next, response=response))

    def _beginning(self) -> list[bytes]:
        message = OutputMessage(id=self._message_id, status="in_progress", content=[])
        return [
            self._response("created", self._begun),
            self._response("in_progress", self._begun),
            _event(ItemEvent(type="response.output_item.added", sequence_number=self._next, item=message)),
            _event(
                PartEvent(
                    type="response.content_part.added",
                    sequence_number=self._next,
                    item_id=self._message_id,
                    part=OutputText(text=""),
                )
            ),
        ]

    def _ending(self, response: Response) -> list[bytes]:
        (message,) = response.output
        (part,) = message.content
        item_id = self._message_id
        return [
            _event(TextEvent(sequence_number=self._next, item_id=item_id, text=part.text, logprobs=part.logprobs)),
            _event(
                PartEvent(type="response.content_part.done", sequence_number=self._next, item_id=item_id, part=part)
            ),
            _event(ItemEvent(type="response.output_item.done", sequence_number=self._next, item=message)),
            self._response(response.status, response),
        ]

    def _delta(self, text: str, logprobs: list[ChatLogprob]) -> bytes:
        return _event(DeltaEvent(sequence_number=self._next, item_id=self._message_id, delta=text, logprobs=logprobs))

    def tell(self, place: int, chunks: Sequence[Chunk]) -> list[bytes]:
        """See `Teller`."""
        events, self._unsaid = self._unsaid, []
        for chunk in chunks:
            self._choice.take(chunk)
            logprobs = chat_logprobs(chunk.logprobs or [], self._top).content
            if chunk.text or logprobs:
                events.append(self._delta(chunk.text, logprobs))
        return events

    def end(self, counts: Counts) -> list[bytes]:
        """See `Teller`."""
        return self._ending(_complete(self._begun, self._message_id, self._choice, counts, self._top))

    def failed(self, problem: GatewayError) -> bytes:
        """See `Teller`."""
        error = ResponseError(code=problem.code or "server_error", message=problem.message)
        return self._response("failed", replace(self._begun, status="failed", error=error))


def _event(body: Any) -> bytes:
    return named_event(body.type, body)


def routes(desk: Desk) -> list[Route]:
    """The endpoint."""
    return [Route("/v1/responses", Responses(desk).answer, methods=["POST"])]
