"""/v1/messages and /v1/messages/count_tokens: bodies, their conversion to a chat, and handlers."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....api.checks import MAX_STOPS, MAX_TOKENS
from ....api.sampling_params import SEED_LIMIT
from ...interfaces import GatewayError
from ..body_types import Answer, Ignored, LoraWeights, ModelName, Part, Refused, Text
from ..chat.endpoint import open_chat
from ..chat.request import MAX_MESSAGES, ChatMessage, ChatRequest, TextPart
from ..context import GatewayContext, caller_of, errors_as_400, json_response, new_id, renamed_fields
from ..event_stream import EventStream
from ..response_format import JsonSchemaFormat, ResponseFormat, Schema
from ..sampling_fields import StopString, TokenCount
from ..tools import MAX_TOOLS, CalledFunction, ChosenFunction, ChosenTool, Function, PastCall, Tool, for_template
from .message_events import PING, Message, MessageFormatter, content_of, ending_of, usage_of

BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a block that Claude Code puts before its system prompt. It differs between requests of a conversation."""
_FIELDS = {"response_format": "output_config.format", "stop": "stop_sequences"}
"""Fields of a chat -> fields of a message that set them."""
_REMEDIES = {
    "mcp_servers": "call MCP servers in the client, and describe their tools in tools",
    "container": "run code in the client",
}
"""Refused fields -> what to do instead."""
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
Id = Annotated[str, Meta(max_length=256)]


class TextBlock(Part, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A text."""

    text: Text


class ThinkingBlock(Part, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. Its signature is ignored."""

    thinking: Text


class RedactedThinkingBlock(Part, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server, which is left out."""


class ToolUseBlock(Part, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call in an earlier answer."""

    id: Id
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(Part, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: Id
    content: Text | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)] | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageParam(Part, frozen=True, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class CustomTool(Part, frozen=True, kw_only=True):
    """A tool of the client. `input_schema`: JSON schema of its arguments, which calls match even without `strict`."""

    name: ToolName
    type: Annotated[str, Meta(description='"custom"')] | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None


class AutoChoice(Part, frozen=True, kw_only=True, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Part, frozen=True, kw_only=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Part, frozen=True, kw_only=True, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Part, frozen=True, kw_only=True, tag_field="type", tag="none"):
    """The model must not call tools."""


class ThinkingOption(Part, frozen=True, kw_only=True):
    """Any type but `disabled` sets the chat template's `enable_thinking`. Budgets are ignored.

    `display`: "omitted" leaves the reasoning out of the answer.
    """

    type: Annotated[str, Meta(max_length=64)]
    display: Annotated[str, Meta(max_length=64)] | None = None


class OutputFormat(Part, frozen=True, kw_only=True):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Part, frozen=True, kw_only=True):
    """`format` of the text. `effort` is ignored."""

    format: OutputFormat | None = None


class CountTokensRequest(Part, frozen=True, kw_only=True):
    """A conversation with its tools."""

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    system: Text | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: Refused = None
    container: Refused = None

    def as_chat(self, inline_system: bool = False) -> ChatRequest:
        """Return the body of a chat with the same conversation. Raises GatewayError 400 that names the field.

        inline_system   messages of the system stay where they are; otherwise those after the first message become
                        text of the user's turn
        """
        for field, remedy in _REMEDIES.items():
            if getattr(self, field):
                text = f"{field} is not supported; {remedy}"
                raise GatewayError(400, text, code="unsupported_parameter", param=field)
        conversation, continues = self._conversation(inline_system), self.messages[-1].role == "assistant"
        if not conversation:
            raise GatewayError(400, "messages has no content; add a text block to one of them", param="messages")
        if continues and conversation[-1].tool_calls:
            text = "messages ends with a tool_use block; add a user message with its tool_result"
            raise GatewayError(400, text, param="messages")
        thinking = self.thinking
        thinks = thinking is not None and thinking.type != "disabled"
        return ChatRequest(
            model=self.model,
            messages=conversation,
            tools=self._chat_tools(),
            tool_choice=_chat_choice(self.tool_choice),
            parallel_tool_calls=not getattr(self.tool_choice, "disable_parallel_tool_use", None),
            continue_final_message=continues,
            chat_template_kwargs={"enable_thinking": thinks},
            include_reasoning=thinking is not None and thinks and thinking.display != "omitted",
        )

    @property
    def output_schema(self) -> ResponseFormat | None:
        """The format of the text, as a chat has it."""
        given = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        if given is None:
            return None
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="", schema=given.schema))

    def _conversation(self, inline_system: bool) -> list[ChatMessage]:
        messages: list[ChatMessage] = []
        system = [TextBlock(text=self.system)] if isinstance(self.system, str) else self.system or []
        parts = [TextPart(type="text", text=each.text) for each in system if not each.text.startswith(BILLING_HEADER)]
        if parts:
            messages.append(ChatMessage(role="system", content=parts))
        names: dict[str, str] = {}
        for index, message in enumerate(self.messages):
            if message.role == "assistant":
                messages.append(_answer(message.blocks, names, f"messages[{index}]"))
            else:
                _add_input(messages, message, names, f"messages[{index}]", inline_system)
        return messages

    def _chat_tools(self) -> list[Tool] | None:
        tools = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                raise GatewayError(
                    400,
                    f"tools[{index}].type={tool.type[:64]!r} is a tool that Anthropic defines or runs; this server has "
                    "none of them: leave it out, or describe it by a name, a description and an input_schema",
                    code="unsupported_parameter",
                    param=f"tools[{index}].type",
                )
            function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
            tools.append(Tool(type="function", function=function))
        return tools or None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to answer. `seed`, `min_p` and the fields below it are not Anthropic's."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    context_management: Ignored = None

    seed: Annotated[int, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    lora_weights: LoraWeights | None = None
    receipt: bool | None = None

    def as_chat(self, inline_system: bool = False) -> ChatRequest:
        """Return the body of the same chat. Raises GatewayError 400 that names the field."""
        return structs.replace(
            super().as_chat(inline_system),
            max_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_p=self.min_p,
            priority=self.priority,
            lora_weights=self.lora_weights,
            receipt=self.receipt,
            response_format=self.output_schema,
        )


class TokensCounted(Answer, frozen=True, kw_only=True):
    """Number of tokens of the prompt."""

    input_tokens: int


def _chat_choice(choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None) -> Any:
    if isinstance(choice, NamedChoice):
        return ChosenTool(type="function", function=ChosenFunction(name=choice.name))
    if isinstance(choice, AnyChoice):
        return "required"
    if isinstance(choice, NoChoice):
        return "none"
    return None if choice is None else "auto"


def _answer(blocks: Sequence[Block], names: dict[str, str], where: str) -> ChatMessage:
    """Return an earlier answer, and add its calls to `names`: id of a call -> name of its function."""
    parts: list[TextPart] = []
    calls: list[PastCall] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(TextPart(type="text", text=block.text))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(PastCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments)))
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(f"{where}.content[{index}]", "tool_result", "user")
    return ChatMessage(
        role="assistant",
        content=parts or "",
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) if thoughts else None,
    )


def _add_input(
    messages: list[ChatMessage], message: MessageParam, names: dict[str, str], where: str, inline_system: bool
) -> None:
    """Add a message of the user or the system. Adjacent ones of one role become one turn.

    inline_system   the chat template allows the system after the start
    """
    for index, block in enumerate(message.blocks):
        if isinstance(block, ToolResultBlock):
            content = block.content or ""
            parts = content if isinstance(content, str) else [TextPart(type="text", text=each.text) for each in content]
            name = names.get(block.tool_use_id)
            messages.append(ChatMessage(role="tool", content=parts, tool_call_id=block.tool_use_id, name=name))
        elif isinstance(block, TextBlock):
            if message.role == "system" and block.text.startswith(BILLING_HEADER):
                continue
            keeps_role = inline_system or not messages or messages[-1].role == "system"
            role: Any = "system" if message.role == "system" and keeps_role else "user"
            part = TextPart(type="text", text=block.text)
            last = messages[-1] if messages else None
            if last is not None and last.role == role and isinstance(last.content, list):
                messages[-1] = structs.replace(last, content=[*last.content, part])
            else:
                messages.append(ChatMessage(role=role, content=[part]))
        else:
            raise _misplaced(f"{where}.content[{index}]", str(block.__struct_config__.tag), "assistant")


def _misplaced(where: str, kind: str, role: str) -> GatewayError:
    text = f"{where} is a {kind} block, which belongs into a message of the role {role!r}; move it there"
    return GatewayError(400, text, param=where)


async def chat_of(context: GatewayContext, request: Request, body: CountTokensRequest) -> ChatRequest:
    """Return the body of the same chat, with the system's messages in place if the chat template renders them there.

    Raises GatewayError.
    """
    inline_system = any(message.role == "system" for message in body.messages)
    if inline_system:
        templates = await context.templates(await context.target(request, body.model))
        inline_system = await context.accepts_inline_system(request, templates, bool(body.tools))
    return body.as_chat(inline_system)


async def create_message(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, MessagesRequest)
    with renamed_fields(_FIELDS):
        chat = await open_chat(context, request, await chat_of(context, request, body))
    session, (message,), max_model_len = chat.session, chat.messages, chat.target.model.max_model_len
    session.constraint_field = "tools" if body.tools else "output_config.format"
    message_id = new_id("msg").replace("-", "_")
    initial = Message(id=message_id, model=chat.target.name, usage=usage_of(session.counts))
    if body.stream:
        formatter = MessageFormatter(initial, session.counts, message, body.max_tokens, max_model_len)
        return EventStream(session, formatter, PING)
    (result,) = await session.results(request.receive)
    content = content_of(message, result)
    ending = ending_of(message, result, session.counts, body.max_tokens, max_model_len)
    answer = structs.replace(
        initial,
        content=content,
        stop_reason=ending.stop_reason,
        stop_sequence=ending.stop_sequence,
        usage=usage_of(session.counts),
        sidestream_receipt=session.counts.receipt,
    )
    return json_response(answer, session.headers)


async def count_tokens(context: GatewayContext, request: Request) -> Response:
    """Return the number of tokens of a conversation. An engine counts them, as for its prompts."""
    headers = context.admission.count(caller_of(request), uses_tokens=False)
    body = await chat_of(context, request, await context.read_body(request, CountTokensRequest))
    target, tools = await context.target(request, body.model), body.offered_tools
    prompt = await context.chat_prompt(
        request,
        await context.templates(target),
        body.conversation(),
        None,
        body.continue_final_message,
        body.chat_template_kwargs,
        for_template(tools) if tools else None,
    )
    with errors_as_400("messages"):
        ids = await context.in_tokenizing_turn(request, lambda: context.engines.tokenize(prompt, False))
    return json_response(TokensCounted(input_tokens=len(ids)), headers)


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    return [
        Route("/v1/messages", functools.partial(create_message, context), methods=["POST"]),
        Route("/v1/messages/count_tokens", functools.partial(count_tokens, context), methods=["POST"]),
    ]
