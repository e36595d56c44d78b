"""/v1/chat/completions: bodies, handler, and events of a stream."""

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from msgspec import UNSET, Meta, UnsetType, field, structs, to_builtins
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.sampling_params import SamplingParams
from ...api.structured_outputs import StructuredOutputsParams
from ...protocol.messages import Chunk
from ...text.reasoning import ANY_ANSWER, ReasoningParser, has_reasoning, template_variables
from ..interfaces import GatewayError, ModelInfo
from .beam_search import beam_search_params
from .body_types import (
    Answer,
    Body,
    MetricsField,
    Part,
    ReceiptField,
    Refused,
    TemplateText,
    TemplateVariables,
    Text,
    TokenIds,
    Usage,
)
from .completion_session import (
    CompletionResult,
    CompletionSession,
    Prompt,
    estimated_tokens,
    open_session,
    reserved_tokens,
)
from .context import GatewayContext, Target, caller_of, errors_as_400, json_response, new_id
from .event_stream import ChunkEncoder, EventStream, TextChunkEncoder
from .field_table import with_table_fields
from .logprobs import ChatLogprobs, PromptLogprobs, TokenLogprobs, chat_logprobs, prompt_logprobs
from .response_format import make_constraint, schema_of
from .sampling_fields import LogprobCount, ThinkingBudget, TokenBody, TokenCount, sampling_params
from .tool_call_parser import AnswerParser, CallDelta
from .tools import (
    MAX_TOOLS,
    FunctionCall,
    PastCall,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolFormat,
    Tools,
    for_template,
    format_of,
    grammar_of,
    offered_tools,
)

MAX_MESSAGES = 4096
TAIL_TOKENS = 32
"""Last tokens of a given prompt that may end with a marker of reasoning."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_NO_TEXT = "".join(("no", "text"))
"""Stands for a missing text, known by its identity, so that `text` always has the type of a text."""
Role = Annotated[
    str,
    Meta(max_length=64, description="system, developer, user, assistant, tool, or a role of the chat template"),
]


class TextPart(Part, frozen=True, kw_only=True):
    """A part of a message's content. `text` is also set for the refusal or the reasoning of an earlier answer."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "reasoning"]
    text: Text = field(default_factory=lambda: _NO_TEXT)
    refusal: Text | None = None
    thinking: Text | None = None

    def __post_init__(self) -> None:
        if self.text is _NO_TEXT:
            name = self.type if self.type in ("refusal", "thinking") else "text"
            text = getattr(self, name)
            if text is None or text is _NO_TEXT:
                raise ValueError(f"Object missing required field `{name}`")
            structs.force_setattr(self, "text", text)


class ChatMessage(Part, frozen=True, kw_only=True):
    """One message. `developer` is the same as `system`; other roles than these five are for the template to know."""

    role: Role
    content: Text | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    audio: Refused = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Refused = None


class KvTransferParams(Body, frozen=True, kw_only=True):
    """Tokens of a prompt that another server has rendered, as in vLLM. An engine computes prompts and answers, so there
    are no other parameters of a transfer.
    """

    prompt_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None


@with_table_fields("chat")
class ChatRequest(TokenBody, frozen=True, kw_only=True):
    """A conversation. The model's chat template turns it into a prompt.

    `echo`: the answer begins with the content of the last message, if that is the assistant's. With
    `kv_transfer_params.prompt_token_ids` these are the prompt.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    max_completion_tokens: TokenCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingBudget = None
    kv_transfer_params: KvTransferParams | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None

    @property
    def constraint_field(self) -> str:
        """The field that sets a constraint on the answer."""
        return "tools" if self.offered_tools else super().constraint_field

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call. Raises GatewayError 400 that names the field."""
        return offered_tools(self.tools, self.tool_choice)

    def with_tools(self, params: SamplingParams, tool_format: ToolFormat | None, thinks: bool) -> SamplingParams:
        """Return `params` constrained to text and tool calls in `tool_format`. Raises GatewayError 400.

        thinks   whether the answer may begin with reasoning
        """
        if tool_format is None:
            raise GatewayError(
                400,
                "tools: the model's chat template has no supported tool format (Llama 3's, Hermes', Qwen's)",
                code="unsupported_parameter",
                param="tools",
            )
        if self.structured_outputs is not None:
            text = "structured_outputs and tools exclude each other; use response_format"
            raise GatewayError(400, text, param="structured_outputs")
        answer = schema_of(self.response_format)
        grammar = grammar_of(
            tool_format, self.offered_tools, self.tool_choice, self.parallel_tool_calls, answer, thinks
        )
        return replace(params, structured_outputs=make_constraint("tools", grammar=grammar))

    def continued_text(self) -> str:
        """Return the text of the last message if the answer continues it, else ""."""
        content = self.messages[-1].content if self.continue_final_message else None
        return content if isinstance(content, str) else "".join(part.text for part in content or ())

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. Raises GatewayError 400 that names the field."""
        return template_messages(self.messages)

    @property
    def given_ids(self) -> list[int] | None:
        """The tokens of the prompt, if the body has them."""
        return None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        variables: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        variables |= template_variables(self.reasoning_effort)
        return variables | (self.chat_template_kwargs or {})

    @property
    def echoed(self) -> str:
        """The text before each answer."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant" or last.content is None:
            return ""
        return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)

    def sampling(self, model: ModelInfo) -> SamplingParams:
        """Return the sampling parameters. Raises GatewayError 400 that names the field."""
        if self.top_logprobs and not self.logprobs:
            raise GatewayError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens or model.sampling_defaults.max_tokens
        return sampling_params(self, max_tokens, logprobs, model)


_TEMPLATE_FIELDS = (
    "role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning", "refusal",
)  # fmt: skip


def template_messages(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for `ChatRenderer`, without ignored fields. Raises GatewayError 400 that names the field."""
    for index, message in enumerate(messages):
        for name in ("audio", "function_call"):
            if getattr(message, name):
                where = f"messages[{index}].{name}"
                text = f"{where} is not supported; put its text into content"
                raise GatewayError(400, text, code="unsupported_parameter", param=where)
    return [{name: to_builtins(getattr(message, name)) for name in _TEMPLATE_FIELDS} for message in messages]


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """The generated message. Reasoning has vLLM's names, the older one first; the texts are the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer, frozen=True, kw_only=True):
    """One answer. `stop_reason`: the stop string or stop token id that ended it, if any. `token_ids`: with
    `return_token_ids`.
    """

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The response without streaming."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    metrics: MetricsField = UNSET
    sidestream_receipt: ReceiptField = UNSET


class ChatDelta(Answer, frozen=True, kw_only=True):
    """New content of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer, frozen=True, kw_only=True):
    """New content of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer, frozen=True, kw_only=True):
    """One event of a stream. `prompt_token_ids`: in the first one, with `return_token_ids`. `sidestream_receipt`: in
    the last one with a choice, with `receipt`.
    """

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    sidestream_receipt: ReceiptField = UNSET


class AssistantMessage:
    """Converts the text of one answer to a message, or to deltas of it."""

    def __init__(self, parser: AnswerParser, include_reasoning: bool) -> None:
        self.parser, self._include_reasoning = parser, include_reasoning

    @property
    def is_plain_text(self) -> bool:
        """Whether all text from now on is content."""
        return self.parser.is_plain_text

    def message(self, text: str, token_ids: Sequence[int] = ()) -> AnswerMessage:
        """Return the message for the whole text."""
        parsed = self.parser.push(text, True, token_ids)
        calls = [
            ToolCall(id=_new_call_id(), function=FunctionCall(name=call.name or "", arguments=call.arguments))
            for call in parsed.calls
        ]
        content = parsed.content if parsed.content or not (calls or parsed.reasoning) else None
        reasoning = self._shown(parsed.reasoning)
        return AnswerMessage(
            role="assistant",
            content=content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )

    def delta(self, text: str, last: bool, token_ids: Sequence[int] = ()) -> ChatDelta | None:
        """Return the delta for more text; None if nothing can be sent yet. `last`: the text is complete."""
        parsed = self.parser.push(text, last, token_ids)
        reasoning = self._shown(parsed.reasoning)
        if not parsed.content and not parsed.calls and reasoning is UNSET:
            return None
        return ChatDelta(
            content=parsed.content or UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=list(map(_tool_call_delta, parsed.calls)) or UNSET,
        )

    def _shown(self, reasoning: str) -> str | UnsetType:
        return reasoning if reasoning and self._include_reasoning else UNSET

    def finish_reason(self, reason: Any) -> Any:
        """Return the finish reason: `tool_calls` instead of `stop` if a function is called."""
        return "tool_calls" if reason == "stop" and self.parser.num_calls else reason


def _tool_call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None:
        return ToolCallDelta(index=call.index, function=FunctionCall(arguments=call.arguments))
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, function=function, id=_new_call_id(), type="function")


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True)
class RenderedChat:
    """A prompt, as text or with `needs_prompt_ids` as tokens. `params`: with constraints of tools and reasoning;
    `reasoning`: parsers, one per answer.
    """

    prompt: Prompt
    params: SamplingParams
    reasoning: list[ReasoningParser]
    tool_format: ToolFormat | None


async def render_chat(
    context: GatewayContext,
    request: Request,
    body: ChatRequest,
    target: Target,
    params: SamplingParams,
    conversation: list[dict[str, Any]],
) -> RenderedChat:
    """Apply the chat template. `params`, `conversation`: those of the body. Raises GatewayError."""
    tools, tool_format = body.offered_tools, None
    templates = await context.templates(target, body.chat_template)
    if tools:
        with errors_as_400("tools"):
            template = templates.select(None, True) if templates.templates else ""
        tool_format = format_of(template)
        params = body.with_tools(params, tool_format, has_reasoning(context.settings.reasoning_parser, template))
    given = body.given_ids
    if given is not None:
        if (highest := max(given)) >= target.model.vocabulary:
            name = "kv_transfer_params.prompt_token_ids"
            text = f"{name} names token {highest}, which is outside the model's vocabulary of {target.model.vocabulary}"
            raise GatewayError(400, text, param=name)
        tail = functools.partial(context.engines.detokenize, given[-TAIL_TOKENS:])
        text = await context.in_tokenizing_turn(request, tail)  # it shows whether the answer begins in the reasoning
    else:
        text = await context.chat_prompt(
            request,
            templates,
            conversation,
            body.add_generation_prompt,
            body.continue_final_message,
            body.template_variables,
            for_template(tools) if tools else None,
        )
    parsers = await context.reasoning_parsers(templates, bool(tools), text, body.continued_text(), params.n)
    constraint, start, budget = params.structured_outputs, parsers[0].start, body.thinking_token_budget
    limit = None if budget == -1 or start == "none" else budget
    if constraint is None and limit is not None:
        constraint = StructuredOutputsParams(grammar=ANY_ANSWER)
    if isinstance(constraint, StructuredOutputsParams):
        constraint = replace(constraint, reasoning=start, reasoning_tokens=limit)
        params = replace(params, structured_outputs=constraint)
    prompt: Prompt = given or text
    if body.needs_prompt_ids:
        ids = await context.prompt_ids(request, prompt, bool(body.add_special_tokens))
        prompt = body.truncated(ids, target.model.max_model_len, params.max_tokens)
    return RenderedChat(prompt, params, parsers, tool_format)


@dataclass(frozen=True)
class OpenChat:
    """An admitted chat with its rendered prompt.

    messages     one per answer
    prompt_ids   tokens of the prompt with `return_token_ids`, else None
    """

    target: Target
    session: CompletionSession
    messages: list[AssistantMessage]
    prompt_ids: list[int] | None


async def open_chat(context: GatewayContext, request: Request, body: ChatRequest) -> OpenChat:
    """Admit a counted request, render its prompt and open its session. Raises GatewayError."""
    target = await context.target(request, body.model, body.lora_path, body.lora_weights)
    params, conversation, tools = body.sampling(target.model), body.conversation(), body.offered_tools
    estimate = estimated_tokens(body.given_ids or [conversation, for_template(tools) if tools else None])
    beams = beam_search_params(body, params, target.model)
    with reserved_tokens(context, request, target, estimate, params, body.num_choices) as ticket:
        rendered = await render_chat(context, request, body, target, params, conversation)
        session = open_session(
            context,
            request,
            ticket,
            target,
            [rendered.prompt],
            rendered.params,
            bool(body.stream),
            body.priority,
            body.deadline_seconds,
            add_special_tokens=bool(body.add_special_tokens),
        )
    session.constraint_field, session.beams = body.constraint_field, beams
    session.counts.reasoning = parsers = rendered.reasoning
    names, include_reasoning = [tool.function.name for tool in tools], body.include_reasoning is not False
    messages = [
        AssistantMessage(AnswerParser(each, rendered.tool_format, names), include_reasoning) for each in parsers
    ]
    ids = rendered.prompt if body.return_token_ids and isinstance(rendered.prompt, list) else None
    return OpenChat(target, session, messages, ids)


def choices_of(
    body: ChatRequest, messages: Sequence[AssistantMessage], results: Sequence[CompletionResult]
) -> list[ChatChoice]:
    """Return the choices of the response."""
    return [
        ChatChoice(
            index=index,
            message=_with_echo(body.echoed, message.message(result.text, result.token_ids)),
            logprobs=_logprobs(body, result.logprobs) if body.logprobs else None,
            finish_reason=message.finish_reason(result.finish_reason),
            stop_reason=result.stop_reason,
            token_ids=result.token_ids if body.return_token_ids else None,
        )
        for index, (message, result) in enumerate(zip(messages, results, strict=True))
    ]


async def chat_completions(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    return await answer_chat(context, request, await context.read_body(request, ChatRequest))


async def answer_chat(context: GatewayContext, request: Request, given: ChatRequest) -> Response:
    """Answer a counted request."""
    body = given.with_tokens_as_ids(context.settings.tokens_as_ids)
    chat = await open_chat(context, request, body)
    session, messages, prompt_ids = chat.session, chat.messages, chat.prompt_ids
    answer_id, created = new_id("chatcmpl"), int(time.time())
    if body.stream:
        encoder = ChunkEncoder(
            "chat.completion.chunk",
            answer_id,
            created,
            chat.target.name,
            body.stream_options,
            context.settings.force_usage,
        )
        formatter = _ChatFormatter(encoder, body, messages, prompt_ids)
        return EventStream(session, encoder.with_usage(formatter, session.counts), receipts=True)
    results = await session.results(request.receive)
    choices = choices_of(body, messages, results)
    answer = ChatCompletion(
        id=answer_id,
        created=created,
        model=chat.target.name,
        usage=session.counts.usage(),  # after the messages, which count their reasoning
        prompt_logprobs=None
        if body.prompt_logprobs is None
        else prompt_logprobs(results[0].prompt_logprobs, body.prompt_logprobs),
        prompt_token_ids=prompt_ids,
        metrics=session.counts.metrics,
        sidestream_receipt=session.counts.receipt,
        choices=choices,
    )
    return json_response(answer, session.headers)


def _with_echo(echoed: str, message: AnswerMessage) -> AnswerMessage:
    return structs.replace(message, content=echoed + (message.content or "")) if echoed else message


def _logprobs(body: ChatRequest, logprobs: TokenLogprobs) -> ChatLogprobs:
    return chat_logprobs(logprobs, body.shown(body.top_logprobs or 0), bool(body.return_tokens_as_token_ids))


class _ChatFormatter:
    """Formats the events of one request. The first events send the role of each answer.

    messages     one per answer
    prompt_ids   tokens of the prompt with `return_token_ids`, else None
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        body: ChatRequest,
        messages: list[AssistantMessage],
        prompt_ids: list[int] | None,
    ) -> None:
        self.format_end, self.format_error = encoder.format_end, encoder.format_error
        self._encoder, self._body, self._messages = encoder, body, messages
        self._returns_ids = prompt_ids is not None
        deltas = [ChatDelta(role="assistant", content="")] + ([ChatDelta(content=body.echoed)] if body.echoed else [])
        self._first_events = [
            encoder.event(ChatChunkChoice(index=index, delta=delta), None if index or place else prompt_ids)
            for index in range(len(messages))
            for place, delta in enumerate(deltas)
        ]
        self._text_encoders = [_text_encoder(encoder, index) for index in range(len(messages))]

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        events, self._first_events = self._first_events, []
        for chunk in chunks:
            message = self._messages[chunk.index]
            fast = message.is_plain_text and not self._returns_ids
            if fast and chunk.text and not chunk.logprobs and chunk.finish_reason is None:
                events.append(self._text_encoders[chunk.index].event(chunk.text))
                continue
            logprobs = _logprobs(self._body, chunk.logprobs) if chunk.logprobs else None
            delta = message.delta(chunk.text, chunk.finish_reason is not None, chunk.token_ids)
            has_tokens = self._returns_ids and bool(chunk.token_ids)
            if delta is None and logprobs is None and chunk.finish_reason is None and not has_tokens:
                continue
            choice = ChatChunkChoice(
                index=chunk.index,
                delta=delta or ChatDelta(),
                logprobs=logprobs,
                finish_reason=message.finish_reason(chunk.finish_reason),
                stop_reason=UNSET if chunk.stop_reason is None else chunk.stop_reason,
                token_ids=chunk.token_ids if self._returns_ids else UNSET,
            )
            events.append(self._encoder.event(choice))
        return events


def _text_encoder(encoder: ChunkEncoder, index: int) -> TextChunkEncoder:
    return TextChunkEncoder(encoder, lambda text: ChatChunkChoice(index=index, delta=ChatDelta(content=text)))


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    endpoint = functools.partial(chat_completions, context)
    return [Route("/v1/chat/completions", endpoint, methods=["POST"])]
