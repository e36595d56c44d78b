"""Log-probabilities of prompts: the rows of logits that a step needs for them, and its results."""

from collections.abc import Iterator
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


def limit_chunk(sequence: Sequence, count: int, extra: int) -> tuple[int, int]:
    """Return how many of the next `count` tokens fit if `extra` rows of logits are left, and how many of these rows
    they use. The last token of a chunk has a row anyway.
    """
    begin, end = _span(sequence, count)
    needed = end - begin - (end == sequence.computed + count)
    if begin >= end or needed <= extra:
        return count, max(0, needed)
    return begin + extra + 1 - sequence.computed, extra


def rows_to_score(work: list[tuple[Sequence, int]], query_start: Int32) -> ScoredRows:
    """Return the rows that a step with this `work` must score."""
    extra: list[int] = []
    rows: list[int] = []
    scored: list[int] = []
    most = -1
    for index, (sequence, count) in enumerate(work):
        begin, end = _span(sequence, count) if sequence.scores_prompt else (0, 0)
        if begin >= end:
            continue
        most = max(most, sequence.params.prompt_logprobs or 0)
        offset, last = int(query_start[index]) - sequence.computed, sequence.computed + count - 1
        for position in range(begin, end):
            rows.append(index if position == last else len(work) + len(extra))
            if position != last:
                extra.append(offset + position)
        scored.extend(sequence.tokens[begin + 1 : end + 1])
    return ScoredRows(extra, rows, scored, most)


def scored_tokens(plan: StepPlan, sequences: list[Sequence], result: StepResult) -> Iterator[ScoredTokens]:
    """Yield the newly scored tokens of a step; a recomputed prompt may be scored twice."""
    if result.prompt_tokens is None or result.prompt_logprobs is None or result.prompt_ranks is None:
        return
    places = plan.logits_indices[plan.scored_rows]
    owners = np.searchsorted(plan.query_start, places, side="right") - 1
    for owner in np.unique(owners).tolist():
        sequence, own = sequences[owner], np.flatnonzero(owners == owner)
        own = own[plan.positions[places[own]] >= sequence.scored]
        if len(own) and not sequence.finished:
            yield ScoredTokens(
                sequence, result.prompt_tokens[own], result.prompt_logprobs[own], result.prompt_ranks[own]
            )


def _span(sequence: Sequence, count: int) -> tuple[int, int]:
    """Return the range of the next `count` positions that score their next token."""
    begin = max(sequence.computed, sequence.scored)
    return begin, min(sequence.computed + count, sequence.prompt_length - 1)
