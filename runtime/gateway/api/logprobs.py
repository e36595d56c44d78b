"""Log-probabilities of tokens in the formats of the completion and the chat endpoints."""

from collections.abc import Sequence

from ...protocol.messages import TokenLogprob
from ...text.token_bytes import as_text
from .body_types import Answer


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """/v1/completions: lists with one entry per token. `text_offset`: index of the token's first character in the text.

    With `echo` the lists start with the prompt. Its first token has no log-probability: null.
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
    """A chosen token, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    """/v1/chat/completions: one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(Answer, frozen=True, kw_only=True):
    """A token of the prompt, or one of the likeliest at its position, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt: token id -> log-probability. None for the first token."""
TokenLogprobs = Sequence[Sequence[TokenLogprob]]
"""For each token: the token itself, then the likeliest tokens at its position."""


def text_of(token: TokenLogprob, as_id: bool = False) -> str:
    """Return a token as OpenAI formats it: its text, or `bytes:` and hexadecimal bytes if these are not valid UTF-8.

    With `as_id`, or without a tokenizer, it is `token_id:` and the id, as in vLLM.
    """
    if as_id or token.token_bytes is None:
        return f"token_id:{token.token_id}"
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def completion_logprobs(
    logprobs: TokenLogprobs, offsets: Sequence[int], top: int, first: str | None = None, as_ids: bool = False
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens that start at `offsets` of the text.

    top      number of likeliest tokens next to each token, -1 for all
    first    a token before them without a log-probability; the first offset is its own
    as_ids   see `text_of`
    """
    before = [] if first is None else [first]
    return CompletionLogprobs(
        tokens=[*before, *(text_of(entry[0], as_ids) for entry in logprobs)],
        token_logprobs=[*(None for _ in before), *(_finite(entry[0].logprob) for entry in logprobs)],
        top_logprobs=[*(None for _ in before), *(_by_text(entry, top, as_ids) for entry in logprobs)],
        text_offset=list(offsets),
    )


def _by_text(entry: Sequence[TokenLogprob], top: int, as_ids: bool) -> dict[str, float]:
    """Return the chosen and the likeliest tokens by text.

    If several tokens have the same text, the chosen or else the likeliest one has it as its key, the others their ids.
    The chosen one is the first entry, as in vLLM.
    """
    own = entry[0]
    owners, found = {text_of(own, as_ids): own.token_id}, {}
    for token in sorted(_likeliest(entry, top), key=lambda token: token.token_id != own.token_id):
        text = text_of(token, as_ids)
        has_text = owners.setdefault(text, token.token_id) == token.token_id
        found[text if has_text else f"token_id:{token.token_id}"] = _finite(token.logprob)
    return found


def chat_logprobs(logprobs: TokenLogprobs, top: int, as_ids: bool = False) -> ChatLogprobs:
    """Return the log-probabilities of tokens. `top`: number of likeliest tokens at each; `as_ids`: see `text_of`."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=text_of(entry[0], as_ids),
                logprob=_finite(entry[0].logprob),
                bytes=list(entry[0].token_bytes or b""),
                top_logprobs=[
                    TopLogprob(
                        token=text_of(token, as_ids),
                        logprob=_finite(token.logprob),
                        bytes=list(token.token_bytes or b""),
                    )
                    for token in (_likeliest(entry, top) if top else ())
                ],
            )
            for entry in logprobs
        ]
    )


def prompt_logprobs(logprobs: TokenLogprobs, top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt, given those from its second token on. `top`: see `chat_logprobs`."""
    entries: PromptLogprobs = [
        {
            str(token.token_id): PromptLogprob(
                logprob=_finite(token.logprob),
                rank=token.rank,
                decoded_token=None if token.token_bytes is None else as_text(token.token_bytes),
            )
            for token in entry
            if token is entry[0] or token.rank <= top or top == -1
        }
        for entry in logprobs
    ]
    return [None, *entries]


def _likeliest(entry: Sequence[TokenLogprob], top: int) -> list[TokenLogprob]:
    """Return the `top` likeliest tokens (-1: all), and the chosen one if it is not among them."""
    ranked = sorted({token.token_id: token for token in entry}.values(), key=lambda token: token.rank)
    if top == -1:
        return ranked
    chosen = entry[0].token_id
    return ranked[:top] + [token for token in ranked[top:] if token.token_id == chosen]


def _finite(value: float) -> float:
    """Replace -inf by -9999, as OpenAI does: JSON has no infinity."""
    return max(value, -9999.0)
