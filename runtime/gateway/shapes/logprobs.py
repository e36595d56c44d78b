"""Log-probabilities of an answer's tokens, as the two families of endpoints spell them."""

from collections.abc import Sequence

from ...wire.protocol import TokenLogprob
from .common import Answer


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """/v1/completions: lists of one entry a token. `text_offset`: where the token's text begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(Answer, frozen=True, kw_only=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Answer, frozen=True, kw_only=True):
    """A chosen token, and the likeliest ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    """/v1/chat/completions: one entry a token."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(Answer, frozen=True, kw_only=True):
    """A token at a place of the prompt: the prompt's own, or one of the likeliest. As vLLM's."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt token id -> its log-probability; None for the first, which nothing comes before."""
Places = Sequence[Sequence[TokenLogprob]]


def text_of(token: TokenLogprob) -> str:
    """A token's text; an engine without a tokenizer tells none."""
    return f"token_id:{token.token_id}" if token.text is None else token.text


def completion_logprobs(places: Places, top: int, offset: int) -> CompletionLogprobs:
    """Of tokens whose text begins at character `offset`; `top`: how many of the likeliest are told."""
    offsets = []
    for place in places:
        offsets.append(offset)
        offset += len(text_of(place[0]))
    return CompletionLogprobs(
        tokens=[text_of(place[0]) for place in places],
        token_logprobs=[_finite(place[0].logprob) for place in places],
        top_logprobs=[{text_of(token): _finite(token.logprob) for token in _likeliest(place, top)} for place in places],
        text_offset=offsets,
    )


def chat_logprobs(places: Places, top: int) -> ChatLogprobs:
    """Of these tokens; `top`: how many of the likeliest are told."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=text_of(place[0]),
                logprob=_finite(place[0].logprob),
                bytes=list(text_of(place[0]).encode()),
                top_logprobs=[
                    TopLogprob(
                        token=text_of(token), logprob=_finite(token.logprob), bytes=list(text_of(token).encode())
                    )
                    for token in _likeliest(place, top)
                ],
            )
            for place in places
        ]
    )


def prompt_logprobs(places: Places) -> PromptLogprobs:
    """Of a prompt's tokens from its second on."""
    told: PromptLogprobs = [
        {
            str(token.token_id): PromptLogprob(
                logprob=_finite(token.logprob), rank=token.rank, decoded_token=token.text
            )
            for token in place
        }
        for place in places
    ]
    return [None, *told]


def _likeliest(place: Sequence[TokenLogprob], top: int) -> list[TokenLogprob]:
    return sorted({token.token_id: token for token in place}.values(), key=lambda token: token.rank)[:top]


def _finite(value: float) -> float:
    """JSON has no infinity: a token that cannot be drawn has -9999, as in OpenAI's answers."""
    return max(value, -9999.0)
