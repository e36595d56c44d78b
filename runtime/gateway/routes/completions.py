"""/v1/completions."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...protocol.messages import Chunk, TokenLogprob
from ..contracts import GatewayError
from ..shapes.completions import Completion, CompletionChoice, CompletionRequest
from ..shapes.logprobs import CompletionLogprobs, completion_logprobs, prompt_logprobs
from .answering import Answering, Counts, admit
from .bodies import read_body, while_connected
from .desk import Desk, caller_of, json_response, new_id
from .echo import Echo, echo_of
from .errors import error_body
from .event_stream import EventStream
from .sse import Frame, PlainEvents, error_event


@dataclass
class Choice:
    """One completion as far as it is here."""

    text: str = ""
    places: list[list[TokenLogprob]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_places: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: int | str | None = None

    def take(self, chunk: Chunk) -> None:
        """More of it."""
        self.text += chunk.text
        if chunk.logprobs is not None:
            self.places += chunk.logprobs
            self.offsets += chunk.text_offsets or []
        if chunk.prompt_logprobs is not None:
            self.prompt_places += chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


async def whole(answering: Answering, prompts: int, n: int) -> list[Choice]:
    """All completions, complete: `n` of the first prompt, then of the next."""
    choices = [Choice() for _ in range(prompts * n)]
    async with aclosing(answering.pieces()) as pieces:
        async for place, chunks in pieces:
            for chunk in chunks:
                choices[place * n + chunk.index].take(chunk)
    return choices


class Completions:
    """The endpoint's handler."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def answer(self, request: Request) -> Response:
        """Answers one request."""
        desk = self._desk
        body = await read_body(request, CompletionRequest, desk.settings)
        target = await desk.target(caller_of(request), body.model)
        params, prompts = body.sampling(target.model.sampling_defaults), body.prompts()
        echoes = (
            [await echo_of(desk.engines, prompt, body.logprobs is not None) for prompt in prompts] if body.echo else []
        )
        stream = bool(body.stream)
        answering = admit(desk, request, target, prompts, params, stream, body.priority, body.deadline_seconds)
        answering.constrained_by = body.constrained_by
        answer_id, created = new_id("cmpl"), int(time.time())
        try:
            if stream:
                frame = Frame("text_completion", answer_id, created, target.name, body.stream_options)
                return EventStream(answering, _Events(frame, body.logprobs, echoes, params.n))
            choices = await while_connected(request.receive, whole(answering, len(prompts), params.n))
            for echo, scored in zip(echoes, choices[:: params.n], strict=False):
                echo.score(scored.prompt_places)
        except BaseException:
            await answering.close()
            raise
        answer = Completion(
            id=answer_id,
            created=created,
            model=target.name,
            usage=answering.counts.usage(),
            choices=[
                CompletionChoice(
                    index=index,
                    text=echoes[index // params.n].text + choice.text if echoes else choice.text,
                    logprobs=None
                    if body.logprobs is None
                    else echoes[index // params.n].logprobs(choice.places, choice.offsets, body.logprobs)
                    if echoes
                    else completion_logprobs(choice.places, choice.offsets, body.logprobs),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    prompt_logprobs=None
                    if body.prompt_logprobs is None
                    else prompt_logprobs(choices[index // params.n * params.n].prompt_places, body.prompt_logprobs),
                )
                for index, choice in enumerate(choices)
            ],
        )
        return json_response(answer, answering.headers)


class _Held:
    """Log-probabilities of one completion's tokens whose text has not been sent: a stop string may still cut it off."""

    def __init__(self) -> None:
        self._places: list[list[TokenLogprob]] = []
        self._offsets: list[int] = []
        self._sent = 0

    def take(self, chunk: Chunk) -> tuple[list[list[TokenLogprob]], list[int]]:
        """A chunk in; those that go out with its text, and their offsets."""
        self._places += chunk.logprobs or []
        self._offsets += chunk.text_offsets or []
        self._sent += len(chunk.text)
        ended = chunk.finish_reason is not None
        count = len(self._places) if ended else bisect_left(self._offsets, self._sent)
        places, offsets = self._places[:count], [min(offset, self._sent) for offset in self._offsets[:count]]
        del self._places[:count], self._offsets[:count]
        return places, offsets


class _Events:
    """The events of one request's completions, `n` of each prompt. `top`: how many log-probabilities are reported of a
    token.
    """

    def __init__(self, frame: Frame, top: int | None, echoes: list[Echo], n: int) -> None:
        self._frame, self._top, self._echoes, self._n = frame, top, echoes, n
        self._held: defaultdict[int, _Held] = defaultdict(_Held)
        self._unsaid = {place * n + index: echo for place, echo in enumerate(echoes) for index in range(n)}
        self._plain: dict[int, PlainEvents] = {}

    def tell(self, place: int, chunks: Sequence[Chunk]) -> list[bytes]:
        """See `Teller`."""
        if self._echoes:
            chunks = self._echoes[place].take(chunks)
        return [event for chunk in chunks if (event := self._event(place * self._n + chunk.index, chunk)) is not None]

    def end(self, counts: Counts) -> list[bytes]:
        """See `Teller`."""
        return [self._frame.end(counts.usage())]

    def failed(self, problem: GatewayError) -> bytes:
        """See `Teller`."""
        return error_event(error_body(problem))

    def _event(self, index: int, chunk: Chunk) -> bytes | None:
        if chunk.text and chunk.finish_reason is None and self._top is None and not self._unsaid:
            plain = self._plain.get(index)
            if plain is None:
                plain = PlainEvents(self._frame, lambda text: CompletionChoice(index=index, text=text))
                self._plain[index] = plain
            return plain.event(chunk.text)
        echo = self._unsaid.pop(index, None)
        text = chunk.text if echo is None else echo.text + chunk.text
        logprobs = None if self._top is None else self._logprobs(index, chunk, echo, self._top)
        if not text and logprobs is None and chunk.finish_reason is None:
            return None
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,  # type: ignore[arg-type]  # no abort: that is an error
            stop_reason=chunk.stop_reason,
        )
        return self._frame.event(choice)

    def _logprobs(self, index: int, chunk: Chunk, echo: Echo | None, top: int) -> CompletionLogprobs | None:
        """Those that go out with a chunk; `echo`: after those of the prompt."""
        places, offsets = self._held[index].take(chunk)
        if echo is not None:
            return echo.logprobs(places, offsets, top)
        if not places:
            return None
        before = len(self._echoes[index // self._n].text) if self._echoes else 0
        return completion_logprobs(places, [before + offset for offset in offsets], top)


def routes(desk: Desk) -> list[Route]:
    """The endpoint."""
    return [Route("/v1/completions", Completions(desk).answer, methods=["POST"])]
