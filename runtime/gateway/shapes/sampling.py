"""The fields of a body that say how tokens are drawn, and the `SamplingParams` that they make: the one place where both
spellings meet.
"""

from typing import Annotated, Any, Literal

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
from ..contracts import GatewayError
from .common import Body, Ignored, ModelName, Refused, StreamOptions, TokenId
from .constraints import ResponseFormat, StructuredOutputsBody, constraint_of

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Biases = Annotated[dict[TokenId, Annotated[float, Meta(ge=-BIAS_LIMIT, le=BIAS_LIMIT)]], Meta(max_length=MAX_BIASES)]


class SamplingBody(Body, frozen=True, kw_only=True):
    """What a completion and a chat have in common. A field that is null has its default.

    The second group is vLLM's; two are Sidestream's: after `deadline_seconds` the request ends with
    an error, and `speculation` says how many drafts a step has (at most as many as the engine was started with).
    """

    model: ModelName | None = None
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
    def constrained_by(self) -> str:
        """The field that says what the answer must look like."""
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
    "previous_response_id": "answers are not kept; send the whole conversation in input",
    "conversation": "conversations are not kept; send the whole conversation in input",
}
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "speculation",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_REFUSED_WHEN_SET = (
    "truncate_prompt_tokens",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def refuse(field: str, value: Any) -> None:
    """Raises GatewayError 400 that names `field`, unless its value asks for nothing."""
    if value is None or value is False or value == [] or value == {}:
        return
    remedy = REMEDIES.get(field, "leave it out")
    raise GatewayError(400, f"{field} is not supported; {remedy}", code="unsupported_parameter", param=field)


def sampling_params(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
) -> SamplingParams:
    """A body's fields as parameters, with the model's `defaults` of those that it does not set. The callers read those
    two that are spelled in several ways; `max_tokens` None: up to the model's length.

    Raises GatewayError 400 that names the field.
    """
    for field in _REFUSED_WHEN_SET:
        refuse(field, getattr(body, field))
    if body.stream_options is not None and not body.stream:
        raise GatewayError(400, "stream_options needs stream=true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise GatewayError(400, "prompt_logprobs are told in whole answers; leave stream out", param="prompt_logprobs")
    given = defaults.given() | {"max_tokens": max_tokens}
    given |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    constraint = constraint_of(body.response_format, body.structured_outputs)
    try:
        return SamplingParams(logprobs=logprobs, structured_outputs=constraint, **given)
    except RequestError as problem:
        raise GatewayError(400, str(problem), param=field_of(str(problem))) from None


def field_of(message: str) -> str | None:
    """The field that an error's text begins with."""
    word = message.replace("=", " ").replace("[", " ").replace(".", " ").partition(" ")[0]
    return word if word in SamplingBody.__struct_fields__ else None
