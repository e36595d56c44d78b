"""Names, numbers and lists that several bodies have, with their limits."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from ...protocol.messages import MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS

MAX_PROMPTS = 1024
"""Prompts of one request."""

ModelName = Annotated[str, Meta(min_length=1, max_length=256, description="the base model's name, or an adapter's")]
AdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Ignored = Annotated[Any, Meta(description="taken, and without effect")]
Refused = Annotated[Any, Meta(description="not supported: leave it out, or null")]


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's body. A field that is not known is refused, since it would be left out of account."""


class Answer(Struct, frozen=True, kw_only=True):
    """An answer's body, or an object in it."""


class PromptTokensDetails(Answer, frozen=True, kw_only=True):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer, frozen=True, kw_only=True):
    """Drafts of speculation: those that became output, which counts them as completion tokens, and the others, which
    does not.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer, frozen=True, kw_only=True):
    """What a request used; of all its prompts and completions together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class StreamOptions(Body, frozen=True, kw_only=True):
    """`include_usage`: a last event tells the usage; `include_obfuscation`: taken, and without effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
