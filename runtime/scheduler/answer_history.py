"""Recent answers by adapter content, kept in ring buffers on the device as a source of drafts.

Requests with the same adapter content (as in the prefix cache) draft from each other's answers only. The host tracks
places; the device has the tokens. When a content changes, its ring is marked empty at once.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from .sequence import Sequence
from .step_plan import RINGS, Int32

PROMPT_END = 8
"""Last prompt tokens to keep before an answer, so that its first tokens can be drafted: the longest match."""
NOTHING_KEPT = np.zeros((0, 5), np.int32)


class AnswerHistory:
    """Assigns ring buffers of `tokens` tokens (0: there are none) to adapter contents, and reuses the least recently
    used idle ring.

    content_of             adapter number (-1: the base model) -> name of its content
    ends, filled [RINGS + 1]   of each ring the place after its newest token and the number of valid tokens; the last
                           entry is for sequences without a ring (-1), always 0
    """

    def __init__(self, tokens: int, content_of: Callable[[int], str]) -> None:
        self.tokens = tokens
        self.ends = np.zeros(RINGS + 1, np.int32)
        self.filled = np.zeros(RINGS + 1, np.int32)
        self._content_of = content_of
        self._contents: dict[int, str] = {}  # by adapter number
        self._ring: OrderedDict[str, int] = OrderedDict()  # by content, least recently used first
        self._users = [0] * RINGS
        self._kept: list[tuple[int, int, int, int, int]] = []

    def acquire(self, sequence: Sequence) -> int:
        """Return the ring of a sequence that starts to run; -1 if it has no drafts or all rings are in use."""
        if not self.tokens or sequence.params.speculation == "off":
            return -1
        content = self._contents.setdefault(sequence.number, self._content_of(sequence.number))
        ring = self._ring.get(content)
        if ring is None:
            ring = self._free_ring()
            if ring is None:
                return -1
            self._ring[content] = ring
            self._clear(ring)
        self._ring.move_to_end(content)
        self._users[ring] += 1
        return ring

    def release(self, ring: int) -> None:
        """Remove a user of the ring."""
        if ring >= 0:
            self._users[ring] -= 1

    def keep(self, sequence: Sequence, ring: int) -> None:
        """Copy the end of a finished sequence's answer into its ring with the next plan. The device has its tokens."""
        end = len(sequence.tokens)
        if ring < 0 or end == sequence.prompt_length:
            return
        first = max(sequence.prompt_length - PROMPT_END, 0, end - self.tokens + 1)
        length = 1 + end - first
        if length + sum(1 + entry[2] - entry[1] for entry in self._kept if entry[3] == ring) > self.tokens:
            self._clear(ring)  # a plan must not write a place twice
        place = int(self.ends[ring])
        self._kept.append((sequence.row, first, end, ring, place))
        self.ends[ring] = (place + length) % self.tokens
        self.filled[ring] = min(self.filled[ring] + length, self.tokens)

    @property
    def kept(self) -> Int32:
        """Answers that the next plan copies into rings [N, 5], see `StepPlan`."""
        return np.array(self._kept, np.int32).reshape(-1, 5) if self._kept else NOTHING_KEPT

    def mark_planned(self) -> None:
        """Note that a plan has `kept`."""
        self._kept.clear()

    def plan_fields(self, rings: Int32) -> dict[str, Int32]:
        """Return the fields of a plan of sequences with these rings."""
        return {"rings": rings, "ring_ends": self.ends[rings], "ring_filled": self.filled[rings], "kept": self.kept}

    def clear(self, number: int, forget: bool = False) -> None:
        """Empty the ring of a removed or replaced adapter, also if another name has the same content.

        `forget`: the number is no longer used.
        """
        ring = self._ring.get(self._contents.get(number, "unknown"))
        if ring is not None:
            self._clear(ring)
        if forget:
            self._contents.pop(number, None)

    def clear_all(self) -> None:
        """Empty all rings, because the device may not have their tokens."""
        self._kept.clear()
        self.filled[:] = 0

    def _free_ring(self) -> int | None:
        if len(self._ring) < RINGS:
            return len(self._ring)
        content = next((content for content, ring in self._ring.items() if not self._users[ring]), None)
        return None if content is None else self._ring.pop(content)

    def _clear(self, ring: int) -> None:
        self.filled[ring] = 0
        self._kept = [entry for entry in self._kept if entry[3] != ring]
