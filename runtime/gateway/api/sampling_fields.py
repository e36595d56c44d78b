"""Sampling parameters in bodies, and their conversion to `SamplingParams`."""

import dataclasses
import functools
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from ...api.checks import (
    BIAS_LIMIT,
    MAX_ALLOWED,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_DRAFTS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
)
from ...api.errors import RequestError
from ...api.sampling_defaults import SamplingDefaults
from ...api.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SEED_LIMIT, SamplingParams
from ..interfaces import GatewayError
from .body_types import Body, Ignored, ModelName, Refused, StreamOptions, TokenId
from .response_format import ResponseFormat, StructuredOutputsBody, constraint_of

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Biases = Annotated[dict[TokenId, Annotated[float, Meta(ge=-BIAS_LIMIT, le=BIAS_LIMIT)]], Meta(max_length=MAX_BIASES)]


class SamplingBody(Body, frozen=True, kw_only=True):
    """Common fields of completions and chats. A field that is null has its default.

    The fields of the second group are vLLM's, and two are Sidestream's. After `deadline_seconds` the request ends with
    an error. `speculation` limits the drafts per step, up to the engine's own limit.
    """

    model: ModelName | None = None
    lora_path: Annotated[ModelName, Meta(description="an adapter, as in SGLang; better name it in model")] | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    max_tokens: TokenCount | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    user: Ignored = None
    metadata: Ignored = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    deadline_seconds: Annotated[float, Meta(gt=0, le=86400)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    speculation: Literal["off", "auto"] | Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] | None = None
    prompt_logprobs: Annotated[LogprobCount, Meta(description="without stream only")] | None = None
    truncate_prompt_tokens: Refused = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None

    @property
    def constraint_field(self) -> str:
        """The field that sets a constraint on the answer."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"


REMEDIES = {
    "audio": "the model writes text only",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "tools": "use /v1/chat/completions",
    "suffix": "put the text that follows into the prompt",
    "previous_response_id": "answers are not stored; send the whole conversation in input",
    "conversation": "conversations are not stored; send the whole conversation in input",
}
_DIFFERENT = {"max_tokens", "structured_outputs", "truncate_prompt_tokens"}
_SHARED_FIELDS = sorted(
    {each.name for each in dataclasses.fields(SamplingParams)} & set(SamplingBody.__struct_fields__) - _DIFFERENT
)
"""Fields with the same meaning in bodies and in SamplingParams."""


@functools.cache
def _refused_fields(body_type: type[Body]) -> list[str]:
    hints = get_type_hints(body_type, include_extras=True)
    return [name for name, annotation in hints.items() if annotation == Refused]


def refuse_unsupported(body: Body) -> None:
    """Raise GatewayError 400 if a field of type `Refused` is set."""
    for field in _refused_fields(type(body)):
        refuse(field, getattr(body, field))


def refuse(field: str, value: Any) -> None:
    """Raise GatewayError 400 about an unsupported `field`, unless its value is empty."""
    if value is None or value is False or value == [] or value == {}:
        return
    remedy = REMEDIES.get(field, "leave it out")
    raise GatewayError(400, f"{field} is not supported; {remedy}", code="unsupported_parameter", param=field)


def sampling_params(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
) -> SamplingParams:
    """Return the parameters of a body, with the model's `defaults` for fields that it does not set.

    `max_tokens` and `logprobs` are arguments because their fields differ between endpoints. `max_tokens` None: up to
    the model's length.

    Raises GatewayError 400 that names the field.
    """
    refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise GatewayError(400, "stream_options needs stream=true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise GatewayError(400, "prompt_logprobs does not work with stream; omit one", param="prompt_logprobs")
    given = defaults.given() | {"max_tokens": max_tokens}
    given |= {name: value for name in _SHARED_FIELDS if (value := getattr(body, name)) is not None}
    constraint = constraint_of(body.response_format, body.structured_outputs)
    try:
        return SamplingParams(logprobs=logprobs, structured_outputs=constraint, **given)
    except RequestError as problem:
        raise GatewayError(400, str(problem), param=field_of(str(problem))) from None


def field_of(message: str) -> str | None:
    """Return the field at the start of an error message, if it is one."""
    word = message.replace("=", " ").replace("[", " ").replace(".", " ").partition(" ")[0]
    return word if word in SamplingBody.__struct_fields__ else None
