"""`echo` of /v1/completions: the answer begins with its prompt, and with the log-probabilities of the prompt's tokens
where those of the answer's are reported.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import structs

from ...protocol.messages import Chunk, TokenLogprob
from ..contracts import Engines
from ..shapes.logprobs import CompletionLogprobs, Places, completion_logprobs, text_of


@dataclass
class Echo:
    """One prompt that its answers begin with.

    text     the prompt
    first    the text of its first token, of which no engine reports a log-probability; None: none are reported
    scored   tokens after the first one, whose log-probabilities are to come
    """

    text: str
    first: str | None = None
    scored: int = 0
    _places: list[list[TokenLogprob]] = field(default_factory=list)
    _held: list[Chunk] = field(default_factory=list)

    def score(self, places: Sequence[list[TokenLogprob]]) -> None:
        """Log-probabilities of more of its tokens."""
        self._places += places

    def take(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Chunks of its answers in, those that may be sent now out: none before the whole prompt is scored."""
        for chunk in chunks:
            self.score(chunk.prompt_logprobs or ())
        self._held += chunks
        if len(self._places) < self.scored:
            return []
        released, self._held = self._held, []
        return released

    def logprobs(self, places: Places, offsets: Iterable[int], top: int) -> CompletionLogprobs:
        """Of the prompt's tokens, and of those of an answer after them."""
        prompt = self._aligned
        after = [len(self.text) + offset for offset in offsets]
        return completion_logprobs([*prompt.places, *places], [*prompt.offsets, *after], top, prompt.first)

    @cached_property
    def _aligned(self) -> "_Aligned":
        return _align(self.text, self.first or "", self._places)


async def echo_of(engines: Engines, prompt: str | list[int], scored: bool) -> Echo:
    """What a prompt's answers begin with. `scored`: log-probabilities are reported. Raises the engines' errors."""
    text = prompt if isinstance(prompt, str) else await engines.detokenize(prompt)
    if not scored:
        return Echo(text)
    ids = await engines.tokenize(prompt) if isinstance(prompt, str) else prompt
    return Echo(text, await engines.detokenize(ids[:1]), len(ids) - 1)


@dataclass(frozen=True)
class _Aligned:
    """A prompt's tokens and where they begin in its text: the first token, the others, and all offsets."""

    first: str
    places: list[list[TokenLogprob]]
    offsets: list[int]


def _align(text: str, first: str, places: list[list[TokenLogprob]]) -> _Aligned:
    """Find the tokens in the text, whose first token may be one that the engine puts in front (BOS), and whose first
    word may have a space in front that the text does not have (SentencePiece).
    """
    whole = text.encode()
    pieces = [place[0].token_bytes or b"" for place in places]
    others = b"".join(pieces)
    head = first.encode()
    if others[:1] == b" " and others[1:] == whole:
        begun = next(index for index, piece in enumerate(pieces) if piece)
        places = [*places[:begun], [_without_space(token) for token in places[begun]], *places[begun + 1 :]]
        pieces[begun] = pieces[begun][1:]
        head = b""
    elif whole.endswith(others) and (len(whole) == len(others) or whole == head + others or "\ufffd" in first):
        head = whole[: len(whole) - len(others)]
        first = text_of(TokenLogprob(0, 0.0, 0, head)) if head else first
    elif not whole.startswith(head):
        head = b""
    offsets, position, begun = [], 0, 0  # `begun`: characters that begin before `position`
    for piece in [head, *pieces]:
        inside = 0x80 <= (piece or whole[position : position + 1] or b"a")[0] < 0xC0
        offsets.append(min(max(0, begun - inside), len(text)))
        position += len(piece)
        begun += sum(not 0x80 <= byte < 0xC0 for byte in piece)
    return _Aligned(first, places, offsets)


def _without_space(token: TokenLogprob) -> TokenLogprob:
    return structs.replace(token, token_bytes=(token.token_bytes or b"").removeprefix(b" "))
