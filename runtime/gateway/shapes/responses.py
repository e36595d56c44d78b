"""/v1/responses, the part that needs nothing kept between requests."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs

from ...api.sampling_defaults import SamplingDefaults
from ...api.sampling_params import SEED_LIMIT, SamplingParams
from ..contracts import GatewayError
from .chat import MAX_MESSAGES
from .common import Answer, Body, Ignored, ModelName, Refused, Text
from .constraints import JsonSchemaFormat, ResponseFormat, Schema
from .logprobs import ChatLogprob
from .sampling import LogprobCount, SamplingBody, TokenCount, refuse, sampling_params

LOGPROBS = "message.output_text.logprobs"


class InputPart(Body, frozen=True, kw_only=True):
    """A part of a message; `output_text` is one that the model said before."""

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
    """As `response_format` of a chat, with the schema's fields next to `type`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: Schema | None = None
    description: Text | None = None
    strict: bool | None = None

    def as_response_format(self) -> ResponseFormat:
        """The same of a chat. Raises GatewayError 400."""
        if self.type == "json_schema" and self.schema is None:
            raise GatewayError(400, "text.format.schema is missing; give a JSON schema", param="text.format")
        schema = JsonSchemaFormat(name=self.name or "", schema=self.schema, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema if self.type == "json_schema" else None)


class TextOptions(Body, frozen=True, kw_only=True):
    """`format`: any text, any JSON object, or what fits a JSON schema."""

    format: ResponseTextFormat | None = None
    verbosity: Refused = None


class ResponseStreamOptions(Body, frozen=True, kw_only=True):
    """`include_obfuscation`: taken, and without effect."""

    include_obfuscation: bool | None = None


class ResponseRequest(Body, frozen=True, kw_only=True):
    """A conversation; what needs memory or tools is refused. The second group is not OpenAI's."""

    input: Text | Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: LogprobCount | None = None
    include: Annotated[list[str], Meta(description=f'["{LOGPROBS}"] only', max_length=16)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    truncation: Annotated[str, Meta(description='"disabled" only', max_length=16)] | None = None
    tool_choice: Annotated[Any, Meta(description='"none" or "auto"')] = None
    tools: Refused = None
    previous_response_id: Refused = None
    conversation: Refused = None
    background: Refused = None
    reasoning: Refused = None
    prompt: Refused = None
    store: Ignored = None
    user: Ignored = None
    parallel_tool_calls: Ignored = None
    max_tool_calls: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    seed: Annotated[int, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer tells its tokens' log-probabilities."""
        return bool(self.include) or bool(self.top_logprobs)

    def conversation_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        made: list[dict[str, Any]] = []
        if self.instructions:
            made.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*made, {"role": "user", "content": self.input}]
        for message in self.input:
            content = message.content
            parts = content if isinstance(content, str) else [part.text for part in content]
            made.append({"role": message.role, "content": parts})
        return made

    def told_format(self) -> "TextFormat":
        """The format, as the answer repeats it."""
        form = None if self.text is None else self.text.format
        if form is None:
            return TextFormat()
        return TextFormat(format={name: value for name, value in structs.asdict(form).items() if value is not None})

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """How tokens are drawn; `defaults`: the model's. Raises GatewayError 400 that names the field."""
        for name in _REFUSED:
            refuse(name, getattr(self, name))
        if self.tool_choice not in (None, "none", "auto"):
            refuse("tool_choice", self.tool_choice)
        if self.truncation not in (None, "disabled"):
            raise GatewayError(400, "truncation is not supported; shorten the input", param="truncation")
        if self.text is not None:
            refuse("text.verbosity", self.text.verbosity)
        for entry in self.include or ():
            if entry != LOGPROBS:
                raise GatewayError(400, f"include may name {LOGPROBS} only", param="include")
        form = None if self.text is None or self.text.format is None else self.text.format.as_response_format()
        body = SamplingBody(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            top_k=self.top_k,
            min_p=self.min_p,
            response_format=form,
        )
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return sampling_params(body, self.max_output_tokens or defaults.max_tokens, logprobs, defaults)


_REFUSED = ("tools", "previous_response_id", "conversation", "background", "reasoning", "prompt")


class OutputText(Answer, frozen=True, kw_only=True):
    """What the model said."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    type: Literal["output_text"] = "output_text"


class OutputMessage(Answer, frozen=True, kw_only=True):
    """The answer's one message."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class IncompleteDetails(Answer, frozen=True, kw_only=True):
    """Why the answer is cut off."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer, frozen=True, kw_only=True):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(Answer, frozen=True, kw_only=True):
    """The model does not reason in secret."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(Answer, frozen=True, kw_only=True):
    """What the request used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = field(default_factory=OutputTokensDetails)


class ResponseError(Answer, frozen=True, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str


class TextFormat(Answer, frozen=True, kw_only=True):
    """What was asked for."""

    format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})


class Response(Answer, frozen=True, kw_only=True):
    """The answer; in a stream also as it begins."""

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


class ItemEvent(Answer, frozen=True, kw_only=True):
    """`response.output_item.added` and `.done`."""

    type: str
    sequence_number: int
    item: OutputMessage
    output_index: int = 0


class PartEvent(Answer, frozen=True, kw_only=True):
    """`response.content_part.added` and `.done`."""

    type: str
    sequence_number: int
    item_id: str
    part: OutputText
    output_index: int = 0
    content_index: int = 0


class DeltaEvent(Answer, frozen=True, kw_only=True):
    """`response.output_text.delta`."""

    sequence_number: int
    item_id: str
    delta: str
    logprobs: list[ChatLogprob] = field(default_factory=list)
    type: str = "response.output_text.delta"
    output_index: int = 0
    content_index: int = 0


class TextEvent(Answer, frozen=True, kw_only=True):
    """`response.output_text.done`."""

    sequence_number: int
    item_id: str
    text: str
    logprobs: list[ChatLogprob] = field(default_factory=list)
    type: str = "response.output_text.done"
    output_index: int = 0
    content_index: int = 0
