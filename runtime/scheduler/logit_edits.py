"""Single logits that a step changes or reports: biases, bans, allowed tokens, and token counts for penalties."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api.errors import RequestError
from .step_plan import Int32

if TYPE_CHECKING:
    from .sequence import Sequence

NOTHING_LEFT = (
    "no token is left to sample: bad_words or min_tokens forbids all of allowed_token_ids here; allow more tokens"
)


class BadWords:
    """Token sequences that an output must not hold. As in vLLM, the prompt does not count.

    always  tokens that are banned in every step, from sequences of one token
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self.always: set[int] = set()
        self._after: dict[int, list[tuple[list[int], int]]] = {}  # last prefix token -> (whole prefix, banned token)
        for *prefix, token in sequences:
            if prefix:
                self._after.setdefault(prefix[-1], []).append((prefix, token))
            else:
                self.always.add(token)

    @property
    def needs_history(self) -> bool:
        """Whether bans depend on former tokens."""
        return bool(self._after)

    def banned_after(self, tokens: list[int], start: int) -> set[int]:
        """Return the banned tokens after `tokens`; the output begins at `start`."""
        if len(tokens) == start or tokens[-1] not in self._after:
            return self.always
        output_length = len(tokens) - start
        return self.always | {
            token
            for prefix, token in self._after[tokens[-1]]
            if len(prefix) <= output_length and tokens[-len(prefix) :] == prefix
        }


class LogitEdits:
    """The flat arrays of a SamplingPlan, gathered row by row."""

    def __init__(self) -> None:
        self._bias_rows: list[int] = []
        self._bias_tokens: list[int] = []
        self._bias_values: list[float] = []
        self._history_rows: list[int] = []
        self._history_tokens: list[int] = []
        self._history_counts: list[int] = []
        self._allowed: list[tuple[int, Int32]] = []
        self._reported: list[tuple[int, int, int]] = []

    def add(self, sequence: "Sequence", row: int, step: int) -> None:
        """Append a sequence's edits; `step`: its output tokens so far. Raises RequestError if no token is left."""
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
        self._reported += [(row, 1 + place, token) for place, token in enumerate(params.reported_ids)]
        if params.needs_history:
            counts = sequence.history()
            self._history_rows.extend([row] * len(counts))
            self._history_tokens.extend(counts.keys())
            self._history_counts.extend(counts.values())

    def arrays(self) -> dict[str, Any]:
        """Return the fields of the SamplingPlan."""
        rows = [np.full(len(allowed), row, np.int32) for row, allowed in self._allowed]
        none = _int32([])
        reported = np.asarray(self._reported, np.int32).reshape(-1, 3).T
        return {
            "bias_rows": _int32(self._bias_rows),
            "bias_tokens": _int32(self._bias_tokens),
            "bias_values": np.asarray(self._bias_values, np.float32),
            "history_rows": _int32(self._history_rows),
            "history_tokens": _int32(self._history_tokens),
            "history_counts": _int32(self._history_counts),
            **dict(zip(("reported_rows", "reported_columns", "reported_tokens"), reported, strict=True)),
            "allowed_rows": np.concatenate(rows) if rows else none,
            "allowed_tokens": np.concatenate([allowed for _, allowed in self._allowed]) if rows else none,
        }


def _int32(values: list[int]) -> Int32:
    return np.asarray(values, np.int32)
