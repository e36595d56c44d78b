"""Log-probabilities of an answer's tokens, as the two families of endpoints spell them."""

from collections.abc import Sequence
from typing import NamedTuple

from ...wire.protocol import TokenLogprob
from .common import Answer


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """/v1/completions: lists of one entry a token. `text_offset`: where the token's text begins, in characters. A
    prompt's first token, which `echo` tells too, has no log-probability: null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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


def characters(places: Places) -> int:
    """How much text these tokens make."""
    return sum(len(text_of(place[0])) for place in places)


class FirstToken(NamedTuple):
    """A prompt's first token: its text, and how many characters of the prompt it takes."""

    text: str
    width: int


def completion_logprobs(places: Places, top: int, offset: int, first: FirstToken | None = None) -> CompletionLogprobs:
    """Of tokens whose text begins at character `offset`; `top`: how many of the likeliest are told; `first`: a token
    before them that has no log-probability.
    """
    before = [] if first is None else [first]
    offsets = [offset for _ in before]
    offset += sum(token.width for token in before)
    for place in places:
        offsets.append(offset)
        offset += len(text_of(place[0]))
    return CompletionLogprobs(
        tokens=[*(token.text for token in before), *(text_of(place[0]) for place in places)],
        token_logprobs=[*(None for _ in before), *(_finite(place[0].logprob) for place in places)],
        top_logprobs=[
            *(None for _ in before),
            *({text_of(token): _finite(token.logprob) for token in _likeliest(place, top)} for place in places),
        ],
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


def prompt_logprobs(places: Places, top: int) -> PromptLogprobs:
    """Of a prompt's tokens from its second on; `top`: how many of the likeliest are told next to its own."""
    told: PromptLogprobs = [
        {
            str(token.token_id): PromptLogprob(
                logprob=_finite(token.logprob), rank=token.rank, decoded_token=token.text
            )
            for token in place
            if token is place[0] or token.rank <= top
        }
        for place in places
    ]
    return [None, *told]


def _likeliest(place: Sequence[TokenLogprob], top: int) -> list[TokenLogprob]:
    return sorted({token.token_id: token for token in place}.values(), key=lambda token: token.rank)[:top]


def _finite(value: float) -> float:
    """JSON has no infinity: a token that cannot be drawn has -9999, as in OpenAI's answers."""
    return max(value, -9999.0)
