"""/v1/chat/completions."""

import time
from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...protocol.messages import Chunk
from ..contracts import GatewayError
from ..shapes.chat import ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatRequest
from ..shapes.logprobs import chat_logprobs, prompt_logprobs
from ..shapes.tools import for_template
from ..tools.formats import format_of
from .answering import Counts, admit
from .bodies import read_body, while_connected
from .completions import whole
from .desk import Desk, caller_of, field, json_response, new_id
from .errors import error_body
from .event_stream import EventStream
from .spoken import Spoken
from .sse import Frame, PlainEvents, error_event


class Chats:
    """The endpoint's handler."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def answer(self, request: Request) -> Response:
        """Answers one request."""
        desk = self._desk
        body = await read_body(request, ChatRequest, desk.settings)
        target = await desk.target(caller_of(request), body.model)
        params = body.sampling(target.model.sampling_defaults)
        messages, tools = body.conversation(), body.offered
        templates = await desk.templates(target)
        form = None
        if tools:
            with field("tools"):
                form = format_of(templates.select(None, True)) if templates.templates else None
            params = body.with_tools(params, form)
        prompt = await desk.chat_prompt(
            templates,
            messages,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            for_template(tools) if tools else None,
        )
        stream = bool(body.stream)
        deadline = body.deadline_seconds
        answering = admit(
            desk, request, target, [prompt], params, stream, body.priority, deadline, add_special_tokens=False
        )
        answering.constrained_by = body.constrained_by
        spoken = [Spoken(form, [tool.function.name for tool in tools]) for _ in range(params.n)]
        answer_id, created, top = new_id("chatcmpl"), int(time.time()), body.top_logprobs or 0
        try:
            if stream:
                frame = Frame("chat.completion.chunk", answer_id, created, target.name, body.stream_options)
                return EventStream(answering, _Events(frame, top, spoken))
            choices = await while_connected(request.receive, whole(answering, 1, params.n))
        except BaseException:
            await answering.close()
            raise
        answer = ChatCompletion(
            id=answer_id,
            created=created,
            model=target.name,
            usage=answering.counts.usage(),
            prompt_logprobs=None
            if body.prompt_logprobs is None
            else prompt_logprobs(choices[0].prompt_places, body.prompt_logprobs),
            choices=[
                ChatChoice(
                    index=index,
                    message=spoken[index].message(choice.text),
                    logprobs=chat_logprobs(choice.places, top) if body.logprobs else None,
                    finish_reason=spoken[index].reason(choice.finish_reason),
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ],
        )
        return json_response(answer, answering.headers)


class _Events:
    """The events of one request's answers; the first tells each one's role. `top`: how many log-probabilities are told
    of a token; `spoken`: one for each answer.
    """

    def __init__(self, frame: Frame, top: int, spoken: list[Spoken]) -> None:
        self._frame, self._top, self._spoken = frame, top, spoken
        begun = ChatDelta(role="assistant", content="")
        self._roles = [frame.event(ChatChunkChoice(index=index, delta=begun)) for index in range(len(spoken))]
        self._plain = [_plain(frame, index) if each.is_text else None for index, each in enumerate(spoken)]

    def tell(self, place: int, chunks: Sequence[Chunk]) -> list[bytes]:
        """See `Teller`."""
        events, self._roles = self._roles, []
        for chunk in chunks:
            spoken, plain = self._spoken[chunk.index], self._plain[chunk.index]
            if plain is not None and chunk.text and not chunk.logprobs and chunk.finish_reason is None:
                events.append(plain.event(chunk.text))
                continue
            logprobs = chat_logprobs(chunk.logprobs, self._top) if chunk.logprobs else None
            delta = spoken.delta(chunk.text, chunk.finish_reason is not None)
            if delta is None and logprobs is None and chunk.finish_reason is None:
                continue
            choice = ChatChunkChoice(
                index=chunk.index,
                delta=delta or ChatDelta(),
                logprobs=logprobs,
                finish_reason=spoken.reason(chunk.finish_reason),
                stop_reason=UNSET if chunk.stop_reason is None else chunk.stop_reason,
            )
            events.append(self._frame.event(choice))
        return events

    def end(self, counts: Counts) -> list[bytes]:
        """See `Teller`."""
        return [self._frame.end(counts.usage())]

    def failed(self, problem: GatewayError) -> bytes:
        """See `Teller`."""
        return error_event(error_body(problem))


def _plain(frame: Frame, index: int) -> PlainEvents:
    return PlainEvents(frame, lambda text: ChatChunkChoice(index=index, delta=ChatDelta(content=text)))


def routes(desk: Desk) -> list[Route]:
    """The endpoint."""
    return [Route("/v1/chat/completions", Chats(desk).answer, methods=["POST"])]
