"""Sampling parameters in bodies, and their conversion to `SamplingParams`."""

import dataclasses
from typing import Annotated, Literal, Self, TypeVar

from msgspec import Meta, structs

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
from ...api.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SEED_LIMIT, SamplingParams
from ..interfaces import GatewayError, ModelInfo
from .body_types import Body, LoraWeights, ModelName, StreamOptions, TokenId
from .field_table import refuse_unsupported
from .response_format import ResponseFormat, StructuredOutputsBody, constraint_of

T = TypeVar("T")
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
LogprobCount = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]
ThinkingBudget = (
    Annotated[int, Meta(ge=-1, le=MAX_TOKENS, description="tokens of reasoning, then </think> is forced; -1: no limit")]
    | None
)
Biases = Annotated[dict[TokenId, Annotated[float, Meta(ge=-BIAS_LIMIT, le=BIAS_LIMIT)]], Meta(max_length=MAX_BIASES)]


class GenerationBody(Body, frozen=True, kw_only=True):
    """Fields of all endpoints that generate text. A field that is null has its default.

    The fields of the second group are vLLM's, and two are Sidestream's. After `deadline_seconds` the request ends with
    an error. `speculation` limits the drafts per step, up to the engine's own limit.
    """

    model: ModelName | None = None
    lora_path: Annotated[ModelName, Meta(description="an adapter, as in SGLang; better name it in model")] | None = None
    lora_weights: LoraWeights | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None

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
    structured_outputs: StructuredOutputsBody | None = None
    return_token_offsets: Annotated[bool, Meta(description="of `/render` only")] | None = None


class SamplingBody(GenerationBody, frozen=True, kw_only=True):
    """Common fields of completions and chats. `logprob_token_ids`: tokens to report in place of the likeliest ones;
    `receipt`: return a signed receipt, if the server has a key for it.
    """

    max_tokens: TokenCount | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[LogprobCount, Meta(description="without stream only")] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
    receipt: bool | None = None

    def shown(self, top: int) -> int:
        """Return the number of tokens to show at each position, given that of the likeliest ones; -1: all that came."""
        return -1 if self.logprob_token_ids else top

    @property
    def constraint_field(self) -> str:
        """The field that sets a constraint on the answer."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    @property
    def logprobs_field(self) -> str:
        """The field that sets the number of likeliest tokens."""
        return "top_logprobs"


class TokenBody(SamplingBody, frozen=True, kw_only=True):
    """Fields of completions and chats about token ids, as in vLLM.

    return_token_ids            return the tokens of the prompt and of the answers
    return_tokens_as_token_ids  log-probabilities name tokens `token_id:` and their ids
    truncate_prompt_tokens      keep the prompt's last tokens, or with truncation_side="right" its first ones
    use_beam_search             answer with the `n` best continuations that a search `best_of` wide finds (default: n);
                                the score of one is its log-probability / its number of tokens ** `length_penalty`
    """

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, description="-1: as many as fit with max_tokens")] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None

    def with_tokens_as_ids(self, default: bool) -> Self:
        """Return the body with the server's default of `return_tokens_as_token_ids`."""
        if not default or self.return_tokens_as_token_ids is not None:
            return self
        return structs.replace(self, return_tokens_as_token_ids=True)

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the gateway needs the tokens of a text prompt."""
        return bool(self.return_token_ids or self.use_beam_search) or self.truncate_prompt_tokens is not None

    @property
    def num_choices(self) -> int:
        """Continuations of a prompt that count for the limits of a key."""
        return (self.use_beam_search and self.best_of) or self.n or 1

    def truncated(self, ids: list[T], max_model_len: int, max_tokens: int | None) -> list[T]:
        """Return the prompt's tokens after truncation. Raises GatewayError 400 for an invalid length."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return ids
        if kept == 0 or kept > max_model_len:
            raise GatewayError(
                400,
                f"truncate_prompt_tokens={kept} must be from 1 to max_model_len={max_model_len}, or -1 for as many "
                "tokens as fit",
                param="truncate_prompt_tokens",
            )
        if kept < 0:
            kept = max(1, max_model_len - (max_tokens or 1))
        return ids[:kept] if self.truncation_side == "right" else ids[-kept:]


def check_logprob_count(field: str, count: int | None, model: ModelInfo) -> None:
    """Raise GatewayError 400 that names the field if it asks for more tokens than the server returns."""
    asked = model.vocabulary if count == -1 else count or 0
    if asked > model.max_logprobs:
        whole = " asks for the whole vocabulary, but" if count == -1 else " is too large:"
        raise GatewayError(
            400,
            f"{field}={count}{whole} this server returns at most {model.max_logprobs} tokens per position; give 0 to "
            f"{model.max_logprobs}, or start the server with --max-logprobs {asked}",
            param=field,
        )


_DIFFERENT = {"max_tokens", "structured_outputs"}
_SHARED_FIELDS = sorted(
    {each.name for each in dataclasses.fields(SamplingParams)} & set(SamplingBody.__struct_fields__) - _DIFFERENT
)
"""Fields with the same meaning in bodies and in SamplingParams."""


def sampling_params(body: TokenBody, max_tokens: int | None, logprobs: int | None, model: ModelInfo) -> SamplingParams:
    """Return the parameters of a body, with the model's defaults for fields that it does not set.

    `max_tokens` and `logprobs` are arguments because their fields differ between endpoints. `max_tokens` None: up to
    the model's length.

    Raises GatewayError 400 that names the field.
    """
    refuse_unsupported(body)
    if body.best_of not in (None, body.n or 1) and not body.use_beam_search:
        raise GatewayError(400, "best_of needs use_beam_search; use n and choose among its answers", param="best_of")
    options = body.stream_options
    if options is not None and not body.stream and (options.include_usage or options.continuous_usage_stats):
        raise GatewayError(400, "stream_options needs stream=true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise GatewayError(400, "prompt_logprobs does not work with stream; omit one", param="prompt_logprobs")
    check_logprob_count(body.logprobs_field, logprobs, model)
    check_logprob_count("prompt_logprobs", body.prompt_logprobs, model)
    if body.logprob_token_ids:
        if logprobs is None:
            raise GatewayError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
        check_logprob_count("logprob_token_ids", len(set(body.logprob_token_ids)), model)
    given = model.sampling_defaults.given() | {"max_tokens": max_tokens}
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
