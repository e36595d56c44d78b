"""/v1/chat/completions."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from ...requests.sampling_params import SamplingParams
from ..contracts import GatewayError
from .common import Answer, Body, Ignored, Refused, Text, Usage
from .logprobs import ChatLogprobs, PromptLogprobs
from .sampling import LogprobCount, SamplingBody, TokenCount, refuse, sampling_params

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
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Refused = None
    tool_calls: Refused = None
    function_call: Refused = None


class ChatRequest(SamplingBody, frozen=True, kw_only=True):
    """A conversation, which the model's chat template makes a prompt of."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    max_completion_tokens: TokenCount | None = None
    tools: Refused = None
    tool_choice: Annotated[Any, Meta(description='"none" only; null and "auto" without tools are the same')] = None
    parallel_tool_calls: Ignored = None
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

    def conversation(self) -> list[dict[str, str]]:
        """The messages for the chat template. Raises GatewayError 400 that names the field."""
        return [plain_message(message, f"messages[{place}]") for place, message in enumerate(self.messages)]

    def sampling(self) -> SamplingParams:
        """How tokens are drawn. Raises GatewayError 400 that names the field."""
        for field in _REFUSED:
            refuse(field, getattr(self, field))
        if self.tool_choice not in (None, "none", "auto"):
            refuse("tool_choice", self.tool_choice)
        if self.modalities not in (None, ["text"]):
            refuse("modalities", self.modalities)
        if self.top_logprobs and not self.logprobs:
            raise GatewayError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        return sampling_params(self, self.max_completion_tokens or self.max_tokens, logprobs)


_REFUSED = (
    "tools",
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


def plain_message(message: ChatMessage, where: str) -> dict[str, str]:
    """A message as chat templates take it. Raises GatewayError 400; its text begins with `where`."""
    for field in ("audio", "tool_calls", "function_call"):
        if getattr(message, field):
            raise GatewayError(
                400,
                f"{where}.{field} is not supported; give what it says as content",
                code="unsupported_parameter",
                param=f"{where}.{field}",
            )
    content = message.content
    if content is None:
        raise GatewayError(400, f"{where}.content is missing; give a text", param=f"{where}.content")
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    made = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Answer, frozen=True, kw_only=True):
    """One answer. `stop_reason`: the stop string or stop token id that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
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


class ChatChunkChoice(Answer, frozen=True, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | UnsetType = UNSET


class ChatChunk(Answer, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None
