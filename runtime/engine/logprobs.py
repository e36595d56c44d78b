"""Log-probabilities of output and prompt tokens, as callers get them."""

from ..api.outputs import Logprob
from ..scheduler.prompt_logprobs import ScoredTokens
from ..scheduler.step_plan import StepResult
from ..text.detokenizer import ByteDetokenizer, Detokenizer
from ..text.token_bytes import as_text
from ..text.tokenizer import Tokenizer


class OutputLogprobs:
    """Log-probabilities of a completion's tokens.

    entries     for each token a dict: the sampled token first, then the `count` likeliest ones, or if these are not
                `ranked`, others
    cumulative  sum over the sampled tokens
    offsets     for each token the character of the text at which it begins
    """

    def __init__(self, count: int, ranked: bool) -> None:
        self.entries: list[dict[int, Logprob]] = []
        self.cumulative = 0.0
        self.offsets: list[int] = []
        self._columns, self._ranks = 1 + count, [place * ranked for place in range(1, 1 + count)]

    def add(
        self,
        token: int,
        row: int,
        result: StepResult,
        tokenizer: Tokenizer | None,
        detokenizer: Detokenizer | ByteDetokenizer | None,
        text_length: int,
    ) -> None:
        """Add a token that is `row` of a step's result; the text before it has `text_length` characters."""
        if result.logprob_tokens is None or result.logprobs is None or result.ranks is None:
            return
        tokens = result.logprob_tokens[row, : self._columns].tolist()
        values = result.logprobs[row, : self._columns].tolist()
        at_start, offset = False, 0
        if detokenizer is not None:
            at_start, offset = detokenizer.at_start, text_length + detokenizer.broken_before(token)
        self.entries.append(_entry(tokens, values, [int(result.ranks[row]), *self._ranks], tokenizer, at_start))
        self.offsets.append(offset)
        self.cumulative += values[0]


def prompt_entries(scored: ScoredTokens, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    """Return the log-probabilities of the next prompt tokens."""
    columns = 1 + (scored.sequence.params.prompt_logprobs or 0)
    rows = zip(
        scored.tokens[:, :columns].tolist(), scored.logprobs[:, :columns].tolist(), scored.ranks.tolist(), strict=True
    )
    return [_entry(tokens, values, [rank, *range(1, columns)], tokenizer) for tokens, values, rank in rows]


def _entry(
    tokens: list[int], values: list[float], ranks: list[int], tokenizer: Tokenizer | None, at_start: bool = False
) -> dict[int, Logprob]:
    """Return one position's entry. `ranks`: of the tokens, 0 if unknown; `at_start`: the text begins with the first."""
    entry: dict[int, Logprob] = {}
    for token, value, place in zip(tokens, values, ranks, strict=False):  # there may be fewer tokens than asked for
        if token in entry:
            continue
        if tokenizer is None:
            entry[token] = Logprob(value, place)
            continue
        piece = tokenizer.token_bytes(token)
        if at_start and tokenizer.byte_table is not None:
            piece, _ = tokenizer.byte_table.begin(piece)
        entry[token] = Logprob(value, place, as_text(piece), piece)
    return entry
