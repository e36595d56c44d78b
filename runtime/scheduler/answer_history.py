"""What adapters have answered last: which ring of tokens on the device is whose, and how much of it counts.

A ring belongs to the content of an adapter, as pages of the prefix cache do (the base model has its own): requests that
use the same content draft from each other's answers, and from no other's. The tokens themselves are the device's; what
the host knows is where they lie. So a ring whose content changes is empty at once, whatever the device still has there.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from .sequence import Sequence
from .step_plan import RINGS, Int32

PROMPT_END = 8
"""Tokens of a prompt's end that are kept before its answer, so that an answer's first tokens can be recalled too: as
many as count when places are compared.
"""

NOTHING_KEPT = np.zeros((0, 5), np.int32)


class AnswerRings:
    """Hands rings of `tokens` tokens (0: there are none) to adapters; the idle one that was used longest ago makes
    room.

    content_of   adapter number (-1: the base model) -> name of its content
    ends, filled [RINGS + 1]: of each ring the place after its newest token, and how many tokens up to there count; at
                 last, where a sequence without a ring (-1) looks, always 0
    """

    def __init__(self, tokens: int, content_of: Callable[[int], str]) -> None:
        self.tokens = tokens
        self.ends = np.zeros(RINGS + 1, np.int32)
        self.filled = np.zeros(RINGS + 1, np.int32)
        self._content_of = content_of
        self._contents: dict[int, str] = {}  # of the numbers that have used a ring
        self._ring: OrderedDict[str, int] = OrderedDict()  # by content, the one used longest ago first
        self._users = [0] * RINGS
        self._kept: list[tuple[int, int, int, int, int]] = []

    def acquire(self, sequence: Sequence) -> int:
        """The ring of a sequence that starts to run, or -1: it wants none, or all are in use."""
        if not self.tokens or sequence.params.speculation == "off":
            return -1
        content = self._contents.setdefault(sequence.number, self._content_of(sequence.number))
        ring = self._ring.get(content)
        if ring is None:
            ring = self._free_ring()
            if ring is None:
                return -1
            self._ring[content] = ring
            self._empty(ring)
        self._ring.move_to_end(content)
        self._users[ring] += 1
        return ring

    def release(self, ring: int) -> None:
        """A sequence with this ring runs no more."""
        if ring >= 0:
            self._users[ring] -= 1

    def keep(self, sequence: Sequence, ring: int) -> None:
        """A sequence has ended, and the device has its tokens in its row: the next plan puts its answer into its ring,
        as much of the answer's end as there is room for.
        """
        end = len(sequence.tokens)
        if ring < 0 or end == sequence.prompt_length:
            return
        first = max(sequence.prompt_length - PROMPT_END, 0, end - self.tokens + 1)
        length = 1 + end - first
        if length + sum(1 + entry[2] - entry[1] for entry in self._kept if entry[3] == ring) > self.tokens:
            self._empty(ring)  # a plan writes no place twice
        place = int(self.ends[ring])
        self._kept.append((sequence.row, first, end, ring, place))
        self.ends[ring] = (place + length) % self.tokens
        self.filled[ring] = min(self.filled[ring] + length, self.tokens)

    @property
    def kept(self) -> Int32:
        """What the next plan puts into rings [N, 5], see `StepPlan`."""
        return np.array(self._kept, np.int32).reshape(-1, 5) if self._kept else NOTHING_KEPT

    def told(self) -> None:
        """A plan has `kept`."""
        self._kept.clear()

    def of_plan(self, rings: Int32) -> dict[str, Int32]:
        """What a plan of sequences with these rings says about them."""
        return {"rings": rings, "ring_ends": self.ends[rings], "ring_filled": self.filled[rings], "kept": self.kept}

    def empty(self, number: int, for_ever: bool = False) -> None:
        """An adapter was removed, or its name has a new content: its ring begins again, also where another name has the
        same content. `for_ever`: nobody uses the number any more.
        """
        ring = self._ring.get(self._contents.get(number, "unknown"))
        if ring is not None:
            self._empty(ring)
        if for_ever:
            self._contents.pop(number, None)

    def empty_all(self) -> None:
        """The device may not have what it was told to keep."""
        self._kept.clear()
        self.filled[:] = 0

    def _free_ring(self) -> int | None:
        if len(self._ring) < RINGS:
            return len(self._ring)
        content = next((content for content, ring in self._ring.items() if not self._users[ring]), None)
        return None if content is None else self._ring.pop(content)

    def _empty(self, ring: int) -> None:
        self.filled[ring] = 0
        self._kept = [entry for entry in self._kept if entry[3] != ring]
