"""/v1/chat/completions."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, to_builtins

from ...api.sampling_defaults import SamplingDefaults
from ...api.sampling_params import SamplingParams
from ..contracts import GatewayError
from ..tools.formats import ToolFormat
from .common import Answer, Body, Ignored, Refused, Text, Usage
from .constraints import as_constraint, schema_of
from .logprobs import ChatLogprobs, PromptLogprobs
from .sampling import LogprobCount, SamplingBody, TokenCount, refuse, sampling_params
from .tools import (
    MAX_TOOLS,
    PastCall,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    Tools,
    grammar_of,
    offered,
)

MAX_MESSAGES = 4096


class TextPart(Body, frozen=True, kw_only=True):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body, frozen=True, kw_only=True):
    """One message; `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Refused = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Refused = None
    parsed: Ignored = None


class ChatRequest(SamplingBody, frozen=True, kw_only=True):
    """A conversation, which the model's chat template makes a prompt of."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    max_completion_tokens: TokenCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    modalities: Annotated[list[str], Meta(description='["text"] only', max_length=8)] | None = None
    prediction: Refused = None
    web_search_options: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    chat_template: Refused = None
    documents: Refused = None

    @property
    def constrained_by(self) -> str:
        """The field that says what the answer must look like."""
        return "tools" if self.offered else super().constrained_by

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of. Raises GatewayError 400 that names the field."""
        return offered(self.tools, self.tool_choice)

    def with_tools(self, params: SamplingParams, form: ToolFormat | None) -> SamplingParams:
        """`params` of an answer that may call the tools, spelled in the model's way. Raises GatewayError 400."""
        if form is None:
            raise GatewayError(
                400,
                "tools: the model's chat template knows none that Sidestream can read (Llama 3's, Hermes', Qwen's)",
                code="unsupported_parameter",
                param="tools",
            )
        if self.structured_outputs is not None:
            text = "structured_outputs and tools contradict each other; use response_format"
            raise GatewayError(400, text, param="structured_outputs")
        answer = schema_of(self.response_format)
        grammar = grammar_of(form, self.offered, self.tool_choice, self.parallel_tool_calls, answer)
        return replace(params, structured_outputs=as_constraint("tools", grammar=grammar))

    def conversation(self) -> list[dict[str, Any]]:
        """The messages for the chat template. Raises GatewayError 400 that names the field."""
        return [plain_message(message, f"messages[{place}]") for place, message in enumerate(self.messages)]

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """How tokens are drawn; `defaults`: the model's. Raises GatewayError 400 that names the field."""
        for field in _REFUSED:
            refuse(field, getattr(self, field))
        if self.modalities not in (None, ["text"]):
            refuse("modalities", self.modalities)
        if self.top_logprobs and not self.logprobs:
            raise GatewayError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        most = self.max_completion_tokens or self.max_tokens or defaults.max_tokens
        return sampling_params(self, most, logprobs, defaults)


_REFUSED = (
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
    "chat_template",
    "documents",
)


_FOR_TEMPLATES = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning")


def plain_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message for `as_conversations`, without what has no effect. Raises GatewayError 400; its text begins with
    `where`.
    """
    for field in ("audio", "function_call"):
        if getattr(message, field):
            raise GatewayError(
                400,
                f"{where}.{field} is not supported; give what it says as content",
                code="unsupported_parameter",
                param=f"{where}.{field}",
            )
    given: dict[str, Any] = {name: to_builtins(getattr(message, name)) for name in _FOR_TEMPLATES}
    return given


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer, frozen=True, kw_only=True):
    """One answer. `stop_reason`: the stop string or stop token id that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(Answer, frozen=True, kw_only=True):
    """What is new of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer, frozen=True, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | UnsetType = UNSET


class ChatChunk(Answer, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None
