"""Log-probabilities of prompts: the rows of logits that a step needs for them, and its results."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from .sequence import Sequence
from .step_plan import Float32, Int32, StepPlan, StepResult


class ScoredRows(NamedTuple):
    """Rows to score in a plan: further `logits_indices`, `scored_rows`, `scored_tokens`, and the number of likeliest
    tokens to report (-1: nothing is scored).
    """

    extra: list[int]
    rows: list[int]
    tokens: list[int]
    num_logprobs: int


class ScoredTokens(NamedTuple):
    """The next scored tokens of a prompt: tokens and log-probabilities [n, 1 + k], the prompt's own token first, and
    its ranks [n].
    """

    sequence: Sequence
    tokens: Int32
    logprobs: Float32
    ranks: Int32


def positions_to_score(ranges: Collection[tuple[int, int]], prompt_length: int) -> Int32:
    """Return the positions [N] whose logits score the prompt's tokens in `ranges`; no ranges: all but the first token.

    ranges   (begin, end) of tokens, ascending, from 1 to `prompt_length`
    """
    spans = ranges or [(1, prompt_length)]
    return np.concatenate([np.arange(begin - 1, end - 1, dtype=np.int32) for begin, end in spans])


def limit_chunk(sequence: Sequence, count: int, extra: int) -> tuple[int, int]:
    """Return how many of the next `count` tokens fit if `extra` rows of logits are left, and how many of these rows
    they use. The last token of a chunk has a row anyway.
    """
    due = _due(sequence, count)
    needed = len(due) - (sequence.computed + count - 1 in due[-1:])
    if needed <= extra:
        return count, needed
    return due[extra] + 1 - sequence.computed, extra


def rows_to_score(work: list[tuple[Sequence, int]], query_start: Int32) -> ScoredRows:
    """Return the rows that a step with this `work` must score."""
    extra: list[int] = []
    rows: list[int] = []
    scored: list[int] = []
    most = -1
    for index, (sequence, count) in enumerate(work):
        # hot loop: most sequences decode
        due = _due(sequence, count) if sequence.computed < sequence.prompt_length and sequence.scores_prompt else []
        if not due:
            continue
        most = max(most, sequence.params.prompt_logprobs or 0)
        offset, last = int(query_start[index]) - sequence.computed, sequence.computed + count - 1
        for position in due:
            rows.append(index if position == last else len(work) + len(extra))
            if position != last:
                extra.append(offset + position)
            scored.append(sequence.tokens[position + 1])
    return ScoredRows(extra, rows, scored, most)


def scored_tokens(plan: StepPlan, sequences: list[Sequence], result: StepResult) -> Iterator[ScoredTokens]:
    """Yield the newly scored tokens of a step; a recomputed prompt may be scored twice."""
    if result.prompt_tokens is None or result.prompt_logprobs is None or result.prompt_ranks is None:
        return
    places = plan.logits_indices[plan.scored_rows]
    owners = np.searchsorted(plan.query_start, places, side="right") - 1
    for owner in np.unique(owners).tolist():
        sequence, own = sequences[owner], np.flatnonzero(owners == owner)
        if sequence.finished or not sequence.scores_prompt:
            continue
        own = own[plan.positions[places[own]] >= sequence.next_scored]
        if len(own):
            yield ScoredTokens(
                sequence, result.prompt_tokens[own], result.prompt_logprobs[own], result.prompt_ranks[own]
            )


def _due(sequence: Sequence, count: int) -> list[int]:
    """Return those of the next `count` positions that score their next token."""
    left = sequence.score_positions[sequence.scored :]
    begin, end = np.searchsorted(left, (sequence.computed, sequence.computed + count))
    found: list[int] = left[begin:end].tolist()
    return found
