"""Order of a decode step's sequences by common prefix pages, for cascade attention.

A program with cascade attention compares the block tables of each tile of neighbouring sequences, and reads the prefix
that most of them share once (`ops.attention.prefix_attention`). This takes a launch per layer, so the scheduler marks a
step for such a program only if enough page reads are saved.
"""

import numpy as np

from ....ops.core.kv_layout import MIN_PREFIX_PAGES, MIN_PREFIX_SEQUENCES, PAGE_SIZE
from ..limits import SchedulerLimits
from ..plan_builder import RowTable, Work
from ..sequence import Sequence
from ..step_plan import CASCADE_SEQUENCES, Int32


class SharedPrefixes:
    """Groups sequences with the same prefix pages.

    Prefixes are compared at a few lengths only, by their last page: a page of the prefix cache is found by a key of all
    tokens before it. A sequence keeps its pages and adds only pages of its own, so the order is kept while the step has
    the same sequences. An outdated order, after a preemption, only saves fewer reads: programs compare all pages.
    """

    def __init__(self, limits: SchedulerLimits, rows: RowTable) -> None:
        self._tile, self._least = limits.cascade_tile, limits.cascade_pages
        self._rows = rows
        widest = rows.pages.shape[1]
        powers = [MIN_PREFIX_PAGES << power for power in range(widest.bit_length())]
        lengths = [length for power in powers for length in (power, power + power // 2)]
        self._lengths = np.array([length for length in lengths if length <= widest], np.int32)
        self._sequences: list[Sequence] = []
        self._order: list[int] | None = None

    def group(self, work: Work) -> bool:
        """Reorder the sequences of a decode step, and return True, if cascade attention then reads fewer pages.

        Else `work` stays as it is. Answers do not depend on the order.
        """
        if not self._tile or len(work) < CASCADE_SEQUENCES or not len(self._lengths):
            return False
        sequences = [sequence for sequence, count in work if count == 1]
        if len(sequences) < len(work):
            return False
        if sequences != self._sequences:
            self._sequences, self._order = sequences, self._find_order(self._prefixes(sequences))
        if self._order is None:
            return False
        work[:] = [work[index] for index in self._order]
        return True

    def _prefixes(self, sequences: list[Sequence]) -> Int32:
        """Return the last page of each sequence's prefix of each length [B, lengths]; -1: it has fewer full pages."""
        rows = np.array([sequence.row for sequence in sequences], np.int32)
        full = np.array([sequence.computed for sequence in sequences], np.int32) // PAGE_SIZE
        pages = self._rows.pages[rows[:, None], self._lengths - 1]
        return np.where(full[:, None] >= self._lengths, pages, np.int32(-1))

    def _find_order(self, prefixes: Int32) -> list[int] | None:
        """Return the order with the largest groups first, and within a group by longer prefixes; None: too few saved
        page reads.
        """
        _, group, counts = np.unique(prefixes[:, 0], return_inverse=True, return_counts=True)
        sizes = np.where(prefixes[:, 0] < 0, 0, counts[group])
        order = np.lexsort((*prefixes.T[::-1], -sizes))
        return order.tolist() if self._saved(prefixes[order]) >= self._least else None

    def _saved(self, prefixes: Int32) -> int:
        """Return the page reads that cascade attention saves at least, as `prefix_plan` chooses prefixes."""
        padded = np.pad(prefixes, ((0, -len(prefixes) % self._tile), (0, 0)), constant_values=-1)
        tiles = padded.reshape(-1, self._tile, len(self._lengths))
        first = tiles[:, :, 0]
        alike = (first[:, :, None] == first[:, None, :]) & (first >= 0)[:, :, None]
        own = tiles[np.arange(len(tiles)), alike.sum(2).argmax(1)]  # those of each tile's owner
        shares = (first == own[:, :1]) & (own[:, :1] >= 0)
        common = ((tiles == own[:, None]) | ~shares[:, :, None]).all(1) & (own >= 0)
        pages = (common.cumprod(1) * np.diff(self._lengths, prepend=0)).sum(1)
        sequences = shares.sum(1)
        return int(((sequences - 1) * pages)[sequences >= MIN_PREFIX_SEQUENCES].sum())
