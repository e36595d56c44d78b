"""What a step changes about single logits: biases, bans, allowed tokens, and the history that penalties need."""

from typing import Any

import numpy as np

from ..api.errors import RequestError
from .sequence import Sequence
from .step_plan import Int32

NOTHING_LEFT = (
    "no token is left to sample: allowed_token_ids holds only tokens that bad_words or min_tokens forbids here; allow "
    "more tokens"
)


class LogitEdits:
    """The flat lists of a SamplingPlan, gathered row by row."""

    def __init__(self) -> None:
        self._bias_rows: list[int] = []
        self._bias_tokens: list[int] = []
        self._bias_values: list[float] = []
        self._history_rows: list[int] = []
        self._history_tokens: list[int] = []
        self._history_counts: list[int] = []
        self._allowed: list[tuple[int, Int32]] = []

    def add(self, sequence: Sequence, row: int, step: int) -> None:
        """Append one sequence's; `step` = output tokens so far. Raises RequestError when no token would be left."""
        params = sequence.params
        values: dict[int, float] = dict(params.biases)
        banned = sequence.banned(step)
        values.update(dict.fromkeys(banned, -np.inf))
        self._bias_rows.extend([row] * len(values))
        self._bias_tokens.extend(values.keys())
        self._bias_values.extend(values.values())
        if sequence.allowed is not None:
            if len(banned) >= len(sequence.allowed) and banned.issuperset(sequence.allowed.tolist()):
                raise RequestError(NOTHING_LEFT)
            self._allowed.append((row, sequence.allowed))
        if params.needs_history:
            counts = sequence.history()
            self._history_rows.extend([row] * len(counts))
            self._history_tokens.extend(counts.keys())
            self._history_counts.extend(counts.values())

    def arrays(self) -> dict[str, Any]:
        """The fields of a SamplingPlan that these lists are."""
        rows = [np.full(len(allowed), row, np.int32) for row, allowed in self._allowed]
        none = np.zeros(0, np.int32)
        return {
            "bias_rows": _int32(self._bias_rows),
            "bias_tokens": _int32(self._bias_tokens),
            "bias_values": np.asarray(self._bias_values, np.float32),
            "history_rows": _int32(self._history_rows),
            "history_tokens": _int32(self._history_tokens),
            "history_counts": _int32(self._history_counts),
            "allowed_rows": np.concatenate(rows) if rows else none,
            "allowed_tokens": np.concatenate([allowed for _, allowed in self._allowed]) if rows else none,
        }


def _int32(values: list[int]) -> Int32:
    return np.asarray(values, np.int32)
