"""`echo` of /v1/completions: the answer begins with its prompt, and with the log-probabilities of the prompt's tokens
where those of the answer's are told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...wire.protocol import Chunk, TokenLogprob
from ..contracts import Engines
from ..shapes.logprobs import CompletionLogprobs, FirstToken, Places, characters, completion_logprobs


@dataclass
class Echo:
    """One prompt that its answers begin with.

    text     what is told of it
    first    its first token, of which no engine tells a log-probability; None: none are told
    scored   tokens after the first one, whose log-probabilities are to come
    """

    text: str
    first: FirstToken | None = None
    scored: int = 0
    _places: list[list[TokenLogprob]] = field(default_factory=list)
    _held: list[Chunk] = field(default_factory=list)

    def score(self, places: Sequence[list[TokenLogprob]]) -> None:
        """Log-probabilities of more of its tokens."""
        self._places += places

    def take(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Chunks of its answers in, those that may be told now out: none before the whole prompt is scored."""
        for chunk in chunks:
            self.score(chunk.prompt_logprobs or ())
        self._held += chunks
        if len(self._places) < self.scored:
            return []
        told, self._held = self._held, []
        return told

    def logprobs(self, places: Places, top: int) -> CompletionLogprobs:
        """Of the prompt's tokens, and of those of an answer after them."""
        return completion_logprobs([*self._places, *places], top, 0, self.first)

    @property
    def characters(self) -> int:
        """Of the tokens that `logprobs` tells before an answer's."""
        return (self.first.width if self.first else 0) + characters(self._places)


async def echo_of(engines: Engines, prompt: str | list[int], scored: bool) -> Echo:
    """What a prompt's answers begin with. `scored`: log-probabilities are told. Raises the engines' errors."""
    text = prompt if isinstance(prompt, str) else await engines.detokenize(prompt)
    if not scored:
        return Echo(text)
    ids = await engines.tokenize(prompt) if isinstance(prompt, str) else prompt
    first = await engines.detokenize(ids[:1])
    # a token that the engine puts before a text takes no room in it
    return Echo(text, FirstToken(first, len(first) if text.startswith(first) else 0), len(ids) - 1)
