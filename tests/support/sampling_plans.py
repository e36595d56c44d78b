"""Step plans of which only the sampling counts."""

from typing import Any

import numpy as np
from sidestream.runtime.scheduler.step_plan import Int32, SamplingPlan, StepPlan

EMPTY = np.zeros(0, np.int32)


def sampling(rows: int, **fields: Any) -> SamplingPlan:
    """So many rows at temperature 1, but for `fields`."""
    ones = np.ones(rows, np.float32)
    defaults: dict[str, Any] = dict(
        greedy=False,
        num_logprobs=-1,
        num_prompt_logprobs=-1,
        temperature=ones,
        top_k=np.zeros(rows, np.int32),
        top_p=ones,
        min_p=0 * ones,
        seeds=np.arange(rows, dtype=np.int64),
        steps=np.full(rows, 3, np.int64),
        bias_rows=EMPTY,
        bias_tokens=EMPTY,
        bias_values=np.zeros(0, np.float32),
        allowed_rows=EMPTY,
        allowed_tokens=EMPTY,
        reported_rows=EMPTY,
        reported_columns=EMPTY,
        reported_tokens=EMPTY,
        history_rows=EMPTY,
        history_tokens=EMPTY,
        history_counts=EMPTY,
        presence_penalty=0 * ones,
        frequency_penalty=0 * ones,
        repetition_penalty=ones,
    )
    return SamplingPlan(**{**defaults, **fields})


def plan(settings: SamplingPlan, scored_rows: Int32 = EMPTY, scored_tokens: Int32 = EMPTY) -> StepPlan:
    """A decode step."""
    rows = len(settings.temperature)
    index = np.arange(rows, dtype=np.int32)
    return StepPlan(
        0,
        True,
        index,
        index,
        index,
        index,
        index[:, None],
        index,
        np.arange(rows + 1, dtype=np.int32),
        index,
        scored_rows,
        scored_tokens,
        index,
        EMPTY,
        EMPTY,
        EMPTY.reshape(0, 2),
        settings,
    )


def int32(*values: int) -> Int32:
    """An array."""
    return np.asarray(values, np.int32)
