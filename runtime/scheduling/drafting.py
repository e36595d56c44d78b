"""How many drafts a step has with speculation="auto": one number for all its sequences, because the largest number
decides which program runs, and what it costs all of them.
"""

from collections.abc import Mapping, Sequence

from ..steps.plan import DRAFT_SIZES
from .speculation import Speculation

MARGIN = 1.05
"""So many times the tokens per second of a step without drafts must be expected: more rows are also sampled, which the
times of programs do not have in them.
"""
WORTH = dict(zip(DRAFT_SIZES, (0.25, 0.8, 2.5), strict=True))
"""Where no times are known: drafts -> what a sequence must be expected to accept of them."""
PAUSE = 64
"""Steps without drafts until one is tried again."""

Entry = tuple[Speculation | None, int]
"""Of a sequence: its speculation, and the most drafts that it has room for in this step."""


class StepTimes:
    """What programs take by themselves. `measured`: (sequences, rows a sequence, seconds), one row without drafts."""

    def __init__(self, measured: Sequence[tuple[int, int, float]]) -> None:
        self._by_rows: dict[int, list[tuple[int, float]]] = {}
        for sequences, rows, seconds in sorted(measured):
            self._by_rows.setdefault(rows, []).append((sequences, seconds))
        self._found: dict[int, dict[int, float]] = {}

    def of(self, sequences: int) -> Mapping[int, float]:
        """Drafts -> seconds of a step of so many sequences, for all for which there are programs; nothing where a step
        without drafts was not measured.
        """
        if sequences not in self._found:
            found = {
                rows - 1: next((seconds for size, seconds in sizes if size >= sequences), 0.0)
                for rows, sizes in sorted(self._by_rows.items())
            }
            known = {drafts: seconds for drafts, seconds in found.items() if seconds > 0}
            self._found[sequences] = known if 0 in known else {}
        return self._found[sequences]


def expected(acceptance: float, drafts: int) -> float:
    """Drafts that are accepted of so many, if each holds with probability `acceptance` once those before it do."""
    return float(drafts) if acceptance >= 1 else acceptance * (1 - acceptance**drafts) / (1 - acceptance)


def fastest(seconds: Mapping[int, float], tokens: float, adaptive: Sequence[tuple[float, int]], asked: int = 0) -> int:
    """The drafts with which a step makes the most tokens per second, or 0 where none make MARGIN times as many as a
    step without.

    seconds   drafts -> what a step takes; has 0
    tokens    that the step is expected to make without drafts of the sequences that `adaptive` has
    adaptive  (acceptance, most drafts) of the sequences that the number is for
    asked     drafts that another sequence of the step has all the same
    """

    def takes(drafts: int) -> float:
        return min((took for size, took in seconds.items() if size >= drafts), default=seconds[max(seconds)])

    best, most = 0, MARGIN * tokens / takes(asked)
    for drafts in sorted(seconds):
        made = tokens + sum(expected(acceptance, min(drafts, room)) for acceptance, room in adaptive)
        if drafts and made / takes(max(drafts, asked)) > most:
            best, most = drafts, made / takes(max(drafts, asked))
    return best


def by_table(sequences: int, adaptive: Sequence[tuple[float, int]], most: int) -> int:
    """The same where no times are known: the most drafts, up to `most`, of which `sequences` sequences are expected to
    accept what WORTH says, on average. Those that are not in `adaptive` accept none.
    """
    for drafts in reversed(DRAFT_SIZES):
        held = sum(expected(acceptance, min(drafts, room)) for acceptance, room in adaptive)
        if drafts <= most and held >= WORTH[drafts] * sequences:
            return drafts
    return 0


class Drafting:
    """Chooses, step by step."""

    def __init__(self, measured: Sequence[tuple[int, int, float]] = ()) -> None:
        self._times = StepTimes(measured)
        self._paused = 0

    def choose(self, entries: Sequence[Entry], most: int) -> int:
        """Drafts of each adaptive sequence in the next step, at most `most`; to be called once for each step."""
        adaptive = [entry for entry in entries if entry[0] is not None and entry[0].adaptive and entry[1] > 0]
        if not adaptive:
            return 0
        fixed = [entry for entry in entries if entry[0] is not None and not entry[0].adaptive and entry[1] > 0]
        chances = _chances(adaptive)
        seconds = {drafts: took for drafts, took in self._times.of(len(entries)).items() if drafts <= most}
        if seconds:
            tokens = len(entries) + sum(expected(*chance) for chance in _chances(fixed))
            chosen = fastest(seconds, tokens, chances, max((room for _, room in fixed), default=0))
        else:
            chosen = by_table(len(entries) - len(fixed), chances, most)
        if chosen:
            self._paused = 0
            return chosen
        self._paused += 1
        if self._paused < PAUSE:
            return 0
        self._paused = 0
        for speculation, _ in adaptive:
            if speculation is not None:
                speculation.doubt()
        return DRAFT_SIZES[0]


def _chances(entries: Sequence[Entry]) -> list[tuple[float, int]]:
    return [(speculation.acceptance, room) for speculation, room in entries if speculation is not None]
