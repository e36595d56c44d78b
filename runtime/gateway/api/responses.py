"""/v1/responses without stored state: bodies, handler, and events of a stream."""

import functools
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from ...api.sampling_defaults import SamplingDefaults
from ...api.sampling_params import SamplingParams
from ...protocol.messages import Chunk
from ..interfaces import GatewayError
from .body_types import Answer, Body, Ignored, PromptTokensDetails, Refused, TemplateVariables, Text
from .chat import MAX_MESSAGES
from .completion_session import CompletionResult, TokenCounts, estimated_tokens, open_session, reserved_tokens
from .context import GatewayContext, caller_of, json_response, new_id
from .event_stream import EventStream, named_event
from .field_table import refuse, with_table_fields
from .logprobs import ChatLogprob, chat_logprobs
from .response_format import JsonSchemaFormat, ResponseFormat, Schema
from .sampling_fields import GenerationBody, LogprobCount, TokenCount, sampling_params

LOGPROBS = "message.output_text.logprobs"


class InputPart(Body, frozen=True, kw_only=True):
    """A part of a message. `output_text` is an earlier answer of the model."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None


class InputMessage(Body, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)]
    type: Literal["message"] | None = None
    id: Ignored = None
    status: Ignored = None


class ResponseTextFormat(Body, frozen=True, kw_only=True):
    """Like `response_format` of a chat, with the schema's fields next to `type`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: Schema | None = None
    description: Text | None = None
    strict: bool | None = None

    def as_response_format(self) -> ResponseFormat:
        """Return the equivalent `response_format`. Raises GatewayError 400."""
        if self.type == "json_schema" and self.schema is None:
            raise GatewayError(400, "text.format.schema is missing; give a JSON schema", param="text.format")
        schema = JsonSchemaFormat(name=self.name or "", schema=self.schema, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema if self.type == "json_schema" else None)


class TextOptions(Body, frozen=True, kw_only=True):
    """`format`: any text, any JSON object, or JSON that matches a schema."""

    format: ResponseTextFormat | None = None
    verbosity: Refused = None


class ResponseStreamOptions(Body, frozen=True, kw_only=True):
    """`include_obfuscation` is ignored."""

    include_obfuscation: bool | None = None


@with_table_fields("responses")
class ResponseRequest(GenerationBody, frozen=True, kw_only=True):
    """A conversation. Stored state and tools are not supported."""

    input: Text | Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: LogprobCount | None = None
    include: Annotated[list[str], Meta(description=f'["{LOGPROBS}"] only', max_length=16)] | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    truncation: Annotated[str, Meta(description='"disabled" only', max_length=16)] | None = None
    tool_choice: Annotated[Any, Meta(description='"none" or "auto"')] = None
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def max_tokens_field(self) -> str:
        """The field with the largest number of tokens of the answer."""
        return "max_output_tokens"

    @property
    def format_field(self) -> str:
        """The field with `answer_format`."""
        return "text.format"

    @property
    def answer_format(self) -> ResponseFormat | None:
        """The format of the answer. Raises GatewayError 400."""
        return None if self.text is None or self.text.format is None else self.text.format.as_response_format()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer contains log-probabilities."""
        return bool(self.include) or bool(self.top_logprobs)

    def conversation_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for message in self.input:
            content = message.content
            parts = content if isinstance(content, str) else [part.text for part in content]
            messages.append({"role": message.role, "content": parts})
        return messages

    def text_format(self) -> "TextFormat":
        """Return the format as the response repeats it."""
        form = None if self.text is None else self.text.format
        if form is None:
            return TextFormat()
        return TextFormat(format={name: value for name, value in structs.asdict(form).items() if value is not None})

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters. `defaults` are the model's. Raises GatewayError 400 that names the field."""
        if self.tool_choice not in (None, "none", "auto"):
            refuse("tool_choice", self.tool_choice)
        if self.truncation not in (None, "disabled"):
            raise GatewayError(400, "truncation is not supported; shorten the input", param="truncation")
        if self.text is not None:
            refuse("text.verbosity", self.text.verbosity)
        for entry in self.include or ():
            if entry != LOGPROBS:
                raise GatewayError(400, f"include may name {LOGPROBS} only", param="include")
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return sampling_params(self, self.max_output_tokens or defaults.max_tokens, logprobs, defaults)


class OutputText(Answer, frozen=True, kw_only=True):
    """The generated text."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    type: Literal["output_text"] = "output_text"


class OutputMessage(Answer, frozen=True, kw_only=True):
    """The message of the answer."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class IncompleteDetails(Answer, frozen=True, kw_only=True):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class OutputTokensDetails(Answer, frozen=True, kw_only=True):
    """Always zero: there is no hidden reasoning."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(Answer, frozen=True, kw_only=True):
    """Token counts of the request."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = field(default_factory=OutputTokensDetails)


class ResponseError(Answer, frozen=True, kw_only=True):
    """Why the request failed."""

    code: str
    message: str


class TextFormat(Answer, frozen=True, kw_only=True):
    """The requested format of the text."""

    format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})


class Response(Answer, frozen=True, kw_only=True):
    """The response. In a stream, also the initial one without output."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputMessage]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    text: TextFormat = field(default_factory=TextFormat)
    tool_choice: str = "none"
    tools: list[Any] = field(default_factory=list)
    truncation: str = "disabled"


class ResponseEvent(Answer, frozen=True, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete` and `.failed`."""

    type: str
    sequence_number: int
    response: Response


async def responses(context: GatewayContext, request: Request) -> HttpResponse:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, ResponseRequest)
    target = await context.target(caller_of(request), body.model)
    params = body.sampling(target.model.sampling_defaults)
    stream, top, conversation = bool(body.stream), body.top_logprobs or 0, body.conversation_messages()
    with reserved_tokens(context, request, target, estimated_tokens(conversation), params, 1) as ticket:
        prompt = await context.chat_prompt(
            request, await context.templates(target), conversation, template_kwargs=body.chat_template_kwargs
        )
        session = open_session(
            context, request, ticket, target, [prompt], params, stream, body.priority, body.deadline_seconds, False
        )
    session.constraint_field = body.constraint_field
    initial = Response(
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
        text=body.text_format(),
    )
    if stream:
        return EventStream(session, _ResponseFormatter(initial, top))
    (result,) = await session.results(request.receive)
    return json_response(_complete(initial, new_id("msg"), result, session.counts, top), session.headers)


def _complete(initial: Response, message_id: str, result: CompletionResult, counts: TokenCounts, top: int) -> Response:
    cut_off = result.finish_reason == "length"
    message = OutputMessage(
        id=message_id,
        status="incomplete" if cut_off else "completed",
        content=[OutputText(text=result.text, logprobs=chat_logprobs(result.logprobs, top).content)],
    )
    return structs.replace(
        initial,
        status="incomplete" if cut_off else "completed",
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut_off else None,
        output=[message],
        usage=ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=PromptTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.output_tokens,
            total_tokens=counts.prompt_tokens + counts.output_tokens,
        ),
    )


class _ResponseFormatter:
    """Formats the numbered events of one answer."""

    def __init__(self, initial: Response, top: int) -> None:
        self._initial, self._top = initial, top
        self._message_id = new_id("msg")
        self._num_events = 0
        self._result, self._first_events = CompletionResult(), self._format_start()

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _format_start(self) -> list[bytes]:
        message = OutputMessage(id=self._message_id, status="in_progress", content=[])
        return [
            self._event("response.created", response=self._initial),
            self._event("response.in_progress", response=self._initial),
            self._event("response.output_item.added", item=message, output_index=0),
            self._text_event("response.content_part.added", part=OutputText(text="")),
        ]

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        events, self._first_events = self._first_events, []
        for chunk in chunks:
            self._result.add(chunk)
            logprobs = chat_logprobs(chunk.logprobs or [], self._top).content
            if chunk.text or logprobs:
                events.append(self._text_event("response.output_text.delta", delta=chunk.text, logprobs=logprobs))
        return events

    def format_end(self, counts: TokenCounts) -> list[bytes]:
        response = _complete(self._initial, self._message_id, self._result, counts, self._top)
        (message,) = response.output
        (part,) = message.content
        return [
            self._text_event("response.output_text.done", text=part.text, logprobs=part.logprobs),
            self._text_event("response.content_part.done", part=part),
            self._event("response.output_item.done", item=message, output_index=0),
            self._event(f"response.{response.status}", response=response),
        ]

    def format_error(self, problem: GatewayError) -> bytes:
        error = ResponseError(code=problem.code or "server_error", message=problem.message)
        return self._event("response.failed", response=structs.replace(self._initial, status="failed", error=error))


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    return [Route("/v1/responses", functools.partial(responses, context), methods=["POST"])]
