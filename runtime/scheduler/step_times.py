"""What steps take: programs as a start has timed them, and whole steps as they were seen.

A step takes longer than its program: the host plans it and launches what surrounds the program, and contexts are read.
How much longer depends on the model, the host and the number of drafts, so it is learned from the steps themselves.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence

from .step_plan import DRAFT_SIZES

SEEN = 16
"""Steps of a kind, the latest ones, of which the median counts."""
ENOUGH = 4
"""Steps of a kind that must have been seen before they count."""
OUTDATED = 1024
"""Steps of any kind after which one that was seen counts no more: contexts and load have changed, or it was one of the
first, which take longer. Steps without drafts are then looked at again (`LOOK` of drafting): at most 1% of all.
"""

Kind = tuple[int, int]
"""Of a step: the sequences and the drafts a sequence of the program that it runs in."""


class StepTimes:
    """What a step takes, by its sequences and drafts.

    measured  (sequences, rows a sequence, seconds) of programs by themselves, one row without drafts

    Where a kind of step was seen, it takes the median of what was seen, and at least what its program takes. Where it
    was not, it takes its program's time and what steps like it took beyond theirs.
    """

    def __init__(self, measured: Sequence[tuple[int, int, float]]) -> None:
        self._by_rows: dict[int, list[tuple[int, float]]] = {}
        for sequences, rows, seconds in sorted(measured):
            self._by_rows.setdefault(rows, []).append((sequences, seconds))
        self._sizes = [size for size, _ in self._by_rows.get(1, ())]
        self._tables: dict[int, dict[int, float]] = {}
        self._seen: dict[Kind, deque[tuple[int, float]]] = {}
        self._beyond: dict[Kind, float] = {}  # median of what was seen, less the program's time
        self._found: dict[int, dict[int, float]] = {}
        self._planned: dict[int, Kind] = {}
        self._last: tuple[int, Kind | None, float] = (-1, None, 0.0)  # the last step that came back: step, kind, when
        self._oldest = 0

    @property
    def known(self) -> bool:
        """Whether any program was timed."""
        return bool(self._sizes)

    def of(self, sequences: int) -> Mapping[int, float]:
        """Drafts -> seconds of a step of so many sequences, for all for which there are programs; nothing where a step
        without drafts was not measured.
        """
        size = self._size(sequences)
        if size not in self._found:
            table = self._table(size)
            self._found[size] = {
                drafts: seconds + self._expected_beyond(size, drafts) for drafts, seconds in table.items()
            }
        return self._found[size]

    def seen(self, sequences: int, drafts: int) -> bool:
        """Whether enough such steps were seen lately."""
        return (self._size(sequences), drafts) in self._beyond

    def planned(self, step: int, sequences: int, drafts: int) -> None:
        """A step was planned in which all sequences decode, while the one before was with the device: none stands still
        for want of a plan. `drafts`: of the sequence that has the most.
        """
        self._planned[step] = self._size(sequences), next((size for size in DRAFT_SIZES if size >= drafts > 0), 0)

    def came(self, step: int, now: float) -> None:
        """The tokens of a step have come back, `now` on a clock of seconds."""
        if not self._sizes:
            return
        kind = self._planned.pop(step, None)
        before, kind_before, then = self._last
        self._last = step, kind, now
        # a step of another kind before it would be a part of what is measured
        if kind is not None and kind == kind_before and step == before + 1 and now > then:
            self._note(kind, step, now - then)
        if step - self._oldest > OUTDATED:
            self._forget(step)

    def failed(self, step: int) -> None:
        """A step has no tokens."""
        self._planned.pop(step, None)
        self._last = step, None, 0.0

    def _size(self, sequences: int) -> int:
        """Of the decode program that holds so many sequences; 0: none does."""
        place = bisect_left(self._sizes, sequences)
        return self._sizes[place] if place < len(self._sizes) else 0

    def _table(self, size: int) -> dict[int, float]:
        """Drafts -> seconds of the programs by themselves."""
        if size not in self._tables:
            found = {
                rows - 1: next((seconds for other, seconds in sizes if other >= size), 0.0)
                for rows, sizes in sorted(self._by_rows.items())
            }
            known = {drafts: seconds for drafts, seconds in found.items() if seconds > 0}
            self._tables[size] = known if size and 0 in known else {}
        return self._tables[size]

    def _expected_beyond(self, size: int, drafts: int) -> float:
        """What a step takes beyond its program: as it was seen, else as with another number of drafts (or, without
        any, at another size), else as steps of the other sort.
        """
        if (size, drafts) in self._beyond:
            return self._beyond[size, drafts]
        likely = [
            (bool(other) != bool(drafts), abs(self._sizes.index(sequences) - self._sizes.index(size)), seconds)
            for (sequences, other), seconds in self._beyond.items()
            if drafts or not other  # steps with drafts say nothing of one without
        ]
        return min(likely)[-1] if likely else 0.0

    def _note(self, kind: Kind, step: int, seconds: float) -> None:
        seen = self._seen.setdefault(kind, deque(maxlen=SEEN))
        seen.append((step, seconds))
        if len(seen) >= ENOUGH:
            size, drafts = kind
            program = self._table(size).get(drafts)
            if program is not None:
                middle = sorted(seconds for _, seconds in seen)[len(seen) // 2]
                self._beyond[kind] = max(0.0, middle - program)
                self._found.clear()

    def _forget(self, step: int) -> None:
        """Drop what was seen too long ago."""
        for kind, seen in list(self._seen.items()):
            while seen and step - seen[0][0] > OUTDATED:
                seen.popleft()
            if len(seen) < ENOUGH:
                self._beyond.pop(kind, None)
        self._found.clear()
        self._oldest = min((seen[0][0] for seen in self._seen.values() if seen), default=step)
