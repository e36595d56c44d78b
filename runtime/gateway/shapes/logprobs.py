"""Log-probabilities of an answer's tokens, as the two families of endpoints spell them."""

from collections.abc import Sequence

from ...protocol.messages import TokenLogprob
from ...text.token_bytes import as_text
from .common import Answer


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """/v1/completions: lists of one entry a token. `text_offset`: the character of the choice's text at which the token
    begins. A prompt's first token, which `echo` reports too, has no log-probability: null.
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
    """A token as OpenAI spells it: its text, or `bytes:` and its bytes in hexadecimal where it is no whole characters;
    `token_id:` and its id, as in vLLM, where the engine has no tokenizer.
    """
    if token.token_bytes is None:
        return f"token_id:{token.token_id}"
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def completion_logprobs(
    places: Places, offsets: Sequence[int], top: int, first: str | None = None
) -> CompletionLogprobs:
    """The log-probabilities of tokens that begin at these characters of the text.

    `top`: how many of the likeliest are reported, next to the token itself; `first`: a token before them that has no
    log-probability, but an offset.
    """
    before = [] if first is None else [first]
    return CompletionLogprobs(
        tokens=[*before, *(text_of(place[0]) for place in places)],
        token_logprobs=[*(None for _ in before), *(_finite(place[0].logprob) for place in places)],
        top_logprobs=[*(None for _ in before), *(_by_text(place, top) for place in places)],
        text_offset=list(offsets),
    )


def _by_text(place: Sequence[TokenLogprob], top: int) -> dict[str, float]:
    """The likeliest tokens of a place and its own. Of several with the same text its own, else the likeliest, has it as
    its key, and the others have their ids.
    """
    own, likeliest = place[0], _likeliest(place, top)
    if all(token.token_id != own.token_id for token in likeliest):
        likeliest.append(own)
    owners, found = {text_of(own): own.token_id}, {}
    for token in likeliest:
        text = text_of(token)
        has_text = owners.setdefault(text, token.token_id) == token.token_id
        found[text if has_text else f"token_id:{token.token_id}"] = _finite(token.logprob)
    return found


def chat_logprobs(places: Places, top: int) -> ChatLogprobs:
    """The log-probabilities of these tokens; `top`: how many of the likeliest are reported."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=text_of(place[0]),
                logprob=_finite(place[0].logprob),
                bytes=list(place[0].token_bytes or b""),
                top_logprobs=[
                    TopLogprob(
                        token=text_of(token), logprob=_finite(token.logprob), bytes=list(token.token_bytes or b"")
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
                logprob=_finite(token.logprob),
                rank=token.rank,
                decoded_token=None if token.token_bytes is None else as_text(token.token_bytes),
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
