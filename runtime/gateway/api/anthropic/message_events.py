"""Answers of /v1/messages: content blocks, whole and as events of a stream."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, field, structs

from ....protocol.messages import Chunk
from ...interfaces import GatewayError
from ..body_types import Answer, ReceiptField
from ..chat.answer import AssistantMessage
from ..completion_session import CompletionResult, TokenCounts
from ..errors import anthropic_error_body
from ..event_stream import named_event
from ..tools import FunctionCall

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
_NO_INPUT = Raw(b"{}")
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of its deltas, and their field with the text."""
PING = named_event("ping", {"type": "ping"})


class TextContent(Answer, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingContent(Answer, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning before the answer, without a signature."""

    thinking: str
    signature: Literal[""] = ""


class ToolUseContent(Answer, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool. `input`: its arguments; empty if the answer ended before they were complete."""

    id: str
    name: str
    input: Raw


Content = TextContent | ThinkingContent | ToolUseContent


class OutputTokensDetails(Answer, frozen=True, kw_only=True):
    """Tokens of the reasoning, also if it is not in the answer."""

    thinking_tokens: int


class MessageUsage(Answer, frozen=True, kw_only=True):
    """Token counts. `input_tokens` has no tokens that were found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(Answer, frozen=True, kw_only=True):
    """The response. In a stream, also the initial one without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    sidestream_receipt: ReceiptField = UNSET


class MessageEvent(Answer, frozen=True, kw_only=True):
    """An event of a stream. The other fields depend on `type`."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping", "error",
    ]  # fmt: skip


class Ending(Answer, frozen=True, kw_only=True):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


def usage_of(counts: TokenCounts) -> MessageUsage:
    """Return the counts as a message reports them."""
    return MessageUsage(
        input_tokens=counts.prompt_tokens - counts.cached_tokens,
        output_tokens=counts.output_tokens,
        cache_read_input_tokens=counts.cached_tokens,
        output_tokens_details=OutputTokensDetails(thinking_tokens=counts.reasoning_tokens),
    )


def ending_of(
    message: AssistantMessage, result: CompletionResult, counts: TokenCounts, max_tokens: int, max_model_len: int
) -> Ending:
    """Return why a complete answer ended. `max_tokens`: the requested limit."""
    reason = message.finish_reason(result.finish_reason)
    if reason == "tool_calls":
        return Ending(stop_reason="tool_use")
    if reason == "length":
        is_full = counts.output_tokens < max_tokens and counts.prompt_tokens + counts.output_tokens >= max_model_len
        return Ending(stop_reason="model_context_window_exceeded" if is_full else "max_tokens")
    if isinstance(result.stop_reason, str):
        return Ending(stop_reason="stop_sequence", stop_sequence=result.stop_reason)
    return Ending(stop_reason="end_turn")


def content_of(message: AssistantMessage, result: CompletionResult) -> list[Content]:
    """Return the content blocks of a generated text. There is at least one."""
    answer = message.message(result.text, result.token_ids)
    blocks: list[Content] = []
    if answer.reasoning:
        blocks.append(ThinkingContent(thinking=answer.reasoning))
    if answer.content:
        blocks.append(TextContent(text=answer.content))
    for call in answer.tool_calls or ():
        function = call.function
        blocks.append(ToolUseContent(id=_tool_use_id(call.id), name=function.name or "", input=_input(function)))
    return blocks or [TextContent(text="")]


def _tool_use_id(call_id: str) -> str:
    return call_id.replace("call_", "toolu_", 1)


def _input(function: FunctionCall) -> Raw:
    """Return the arguments as the model wrote them, or {} if they are incomplete."""
    try:
        msgspec.json.decode(function.arguments, type=dict[str, Any])
    except ValueError:
        return _NO_INPUT
    return Raw(function.arguments.encode())


class MessageFormatter:
    """Formats the events of one answer.

    initial         the message without content
    counts          of the session, which knows the prompt's tokens before the first chunk
    message         converts text to content and calls
    """

    def __init__(
        self, initial: Message, counts: TokenCounts, message: AssistantMessage, max_tokens: int, max_model_len: int
    ) -> None:
        self._initial, self._counts, self._message = initial, counts, message
        self._max_tokens, self._max_model_len = max_tokens, max_model_len
        self._started = False
        self._index, self._open_type = -1, ""  # of the open block, "" for none
        self._result = CompletionResult()

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        events = [] if self._started else self._format_start()
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._result.finish_reason, self._result.stop_reason = chunk.finish_reason, chunk.stop_reason
            delta = self._message.delta(chunk.text, chunk.finish_reason is not None, chunk.token_ids)
            if delta is None:
                continue
            if delta.reasoning:
                events += self._format_part(ThinkingContent(thinking=""), delta.reasoning)
            if delta.content:
                events += self._format_part(TextContent(text=""), delta.content)
            for call in delta.tool_calls or ():
                if call.id:
                    name = call.function.name or ""
                    events += self._open_block(ToolUseContent(id=_tool_use_id(call.id), name=name, input=_NO_INPUT))
                if call.function.arguments:
                    events.append(self._format_delta(call.function.arguments))
        return events

    def format_end(self, counts: TokenCounts) -> list[bytes]:
        events = [] if self._index >= 0 else list(self._open_block(TextContent(text="")))
        ending = ending_of(self._message, self._result, counts, self._max_tokens, self._max_model_len)
        receipt = {} if counts.receipt is UNSET else {"sidestream_receipt": counts.receipt}
        return [
            *events,
            *self._close_block(),
            _event("message_delta", delta=ending, usage=usage_of(counts), **receipt),
            _event("message_stop"),
        ]

    def format_error(self, problem: GatewayError) -> bytes:
        return b"event: error\ndata: " + anthropic_error_body(problem) + b"\n\n"

    def _format_start(self) -> list[bytes]:
        self._started = True
        message = structs.replace(self._initial, usage=usage_of(self._counts))
        return [_event("message_start", message=message), PING]

    def _format_part(self, empty: Content, text: str) -> Iterator[bytes]:
        """Yield the events for more text. `empty`: the block that it belongs to, which is opened if it is not open."""
        if _type_of(empty) != self._open_type:
            yield from self._open_block(empty)
        yield self._format_delta(text)

    def _format_delta(self, text: str) -> bytes:
        kind, field = _DELTAS[self._open_type]
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: text})

    def _open_block(self, content: Content) -> Iterator[bytes]:
        yield from self._close_block()
        self._index, self._open_type = self._index + 1, _type_of(content)
        yield _event("content_block_start", index=self._index, content_block=content)

    def _close_block(self) -> Iterator[bytes]:
        if self._open_type:
            self._open_type = ""
            yield _event("content_block_stop", index=self._index)


def _type_of(content: Content) -> str:
    return str(content.__struct_config__.tag)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
