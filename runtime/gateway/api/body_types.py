"""Base classes of bodies, and field types with their limits."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from ...api.adapter_sum import MAX_PARTS, MAX_WEIGHT
from ...protocol.messages import MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS
from ...text.chat_files import MAX_TEMPLATE_CHARACTERS

MAX_PROMPTS = 1024
"""Prompts of one request."""

ModelName = Annotated[str, Meta(min_length=1, max_length=256, description="the base model's name, or an adapter's")]
AdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
LoraWeights = Annotated[
    dict[AdapterName, Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]],
    Meta(min_length=1, max_length=MAX_PARTS, description="weights of adapters; their weighted sum answers"),
]
Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
TemplateText = Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS, description="a Jinja template, or a name")]
TemplateVariables = Annotated[dict[str, Any], Meta(max_length=64)]
Ignored = Annotated[Any, Meta(description="accepted and ignored")]
Refused = Annotated[Any, Meta(description="not supported; values without an effect are accepted")]


ReceiptField = dict[str, Any] | list[dict[str, Any]] | UnsetType
"""With `receipt`: that of the answer; in a response to several prompts a list."""


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request body. Unknown fields are refused, since they would have no effect."""


class Part(Struct, frozen=True, kw_only=True):
    """A part of a conversation, or a body of /v1/messages. Unknown fields are ignored.

    Clients send back what other servers have answered, and fields of betas.
    """


class Answer(Struct, frozen=True, kw_only=True):
    """A response body, or an object in one."""


class PromptTokensDetails(Answer, frozen=True, kw_only=True):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer, frozen=True, kw_only=True):
    """Parts of the completion tokens: reasoning, and accepted drafts of speculative decoding. Rejected drafts are no
    completion tokens.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer, frozen=True, kw_only=True):
    """Token counts of a request, over all prompts and completions.

    `adapter_active`: False if the base model answered a prompt, since it lacks the aLoRA adapter's invocation; else
    left out.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    adapter_active: bool | UnsetType = UNSET


class RequestMetrics(Answer, frozen=True, kw_only=True):
    """Times of a request with one answer, as in vLLM with --enable-per-request-metrics.

    time_to_first_token_ms  from the end of the queue to the first token
    generation_time_ms      from the first token to the last; `mean_itl_ms`: its part per token after the first
    tokens_per_second       tokens of the answer over the time from the end of the queue
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | UnsetType = UNSET
    tokens_per_second: float | UnsetType = UNSET


MetricsField = RequestMetrics | UnsetType
"""With --enable-per-request-metrics, in the response to a request with one answer."""


class StreamOptions(Body, frozen=True, kw_only=True):
    """`include_usage`: the last event reports the usage. `include_obfuscation` is ignored.

    `continuous_usage_stats`: each event reports the tokens of its prompt and of its completion so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
