"""Log-probabilities of prompts: which rows of logits a step needs for them, and what came back."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .sequence import Sequence
from .step_plan import Float32, Int32, StepPlan, StepResult


class Rows(NamedTuple):
    """A plan's part of them: further `logits_indices`, `scored_rows`, `scored_tokens`, and how many likeliest tokens to
    report (-1: nothing is scored).
    """

    extra: list[int]
    rows: list[int]
    tokens: list[int]
    most: int


class Scored(NamedTuple):
    """The next scored tokens of a sequence's prompt: tokens and log-probabilities [n, 1 + k], the prompt's own token
    first, and its rank [n].
    """

    sequence: Sequence
    tokens: Int32
    logprobs: Float32
    ranks: Int32


def tokens_within(sequence: Sequence, count: int, extra: int) -> tuple[int, int]:
    """How many of the next `count` tokens a step may compute that has `extra` rows of logits left, and how many of
    these rows it takes. The last token of a chunk has a row anyway.
    """
    begin, end = _span(sequence, count)
    needed = end - begin - (end == sequence.computed + count)
    if begin >= end or needed <= extra:
        return count, max(0, needed)
    return begin + extra + 1 - sequence.computed, extra


def rows_to_score(work: list[tuple[Sequence, int]], query_start: Int32) -> Rows:
    """What the step that computes `work` has to score."""
    found = Rows([], [], [], -1)
    most = -1
    for index, (sequence, count) in enumerate(work):
        begin, end = _span(sequence, count) if sequence.scores_prompt else (0, 0)
        if begin >= end:
            continue
        most = max(most, sequence.params.prompt_logprobs or 0)
        offset, last = int(query_start[index]) - sequence.computed, sequence.computed + count - 1
        for position in range(begin, end):
            found.rows.append(index if position == last else len(work) + len(found.extra))
            if position != last:
                found.extra.append(offset + position)
        found.tokens.extend(sequence.tokens[begin + 1 : end + 1])
    return found._replace(most=most)


def scored_by(plan: StepPlan, sequences: list[Sequence], result: StepResult) -> Iterator[Scored]:
    """What a step has scored, without what is known already: a prompt that is computed again may be scored twice."""
    if result.prompt_tokens is None or result.prompt_logprobs is None or result.prompt_ranks is None:
        return
    places = plan.logits_indices[plan.scored_rows]
    owners = np.searchsorted(plan.query_start, places, side="right") - 1
    for owner in np.unique(owners).tolist():
        sequence, mine = sequences[owner], np.flatnonzero(owners == owner)
        mine = mine[plan.positions[places[mine]] >= sequence.scored]
        if len(mine) and not sequence.finished:
            yield Scored(sequence, result.prompt_tokens[mine], result.prompt_logprobs[mine], result.prompt_ranks[mine])


def _span(sequence: Sequence, count: int) -> tuple[int, int]:
    """Of a chunk of `count` tokens the positions whose successors are to be scored: from, to."""
    begin = max(sequence.computed, sequence.scored)
    return begin, min(sequence.computed + count, sequence.prompt_length - 1)
