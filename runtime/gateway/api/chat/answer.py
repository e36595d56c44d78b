"""Responses of /v1/chat/completions, events of its streams, and what makes them of generated text."""

from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from msgspec import UNSET, UnsetType

from ..body_types import (
    Answer,
    MetricsField,
    ReceiptField,
    Usage,
)
from ..logprobs import ChatLogprobs, PromptLogprobs
from ..tool_call_parser import AnswerParser, CallDelta
from ..tools import (
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """The generated message. Reasoning has vLLM's names, the older one first; the texts are the same, or null."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
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
        reasoning = self._shown(parsed.reasoning) or None
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
