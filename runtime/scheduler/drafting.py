"""How many drafts a step has with speculation="auto": one number for all its sequences, because the largest number
decides which program runs, and what it costs all of them.
"""

from collections.abc import Mapping, Sequence

from .speculation import Speculation
from .step_plan import DRAFT_SIZES
from .step_times import StepTimes

MARGIN = 1.05
"""So many times the tokens per second of a step without drafts must be expected: what steps take is known roughly."""
WORTH = dict(zip(DRAFT_SIZES, (0.25, 0.8, 2.5), strict=True))
"""Where no times are known: drafts -> what a sequence must be expected to accept of them."""
PAUSE = 64
"""Steps without drafts until one is tried again."""
REST = 8
"""Steps for which no drafts is what a step of the same sequences has, once it was found."""
LOOK = 10
"""Steps without drafts, at most, that show what such a step takes at a number of sequences."""

Entry = tuple[Speculation | None, int]
"""Of a sequence: its speculation, and the most drafts that it has room for in this step."""


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
    least: dict[int, float] = {}  # drafts -> what the fastest step takes that has room for them
    took = float("inf")
    for drafts in sorted(seconds, reverse=True):
        took = least[drafts] = min(took, seconds[drafts])
    sizes = sorted(seconds)

    def takes(drafts: int) -> float:
        return least[next((size for size in sizes if size >= drafts), sizes[-1])] if drafts else least[0]

    best, most = 0, MARGIN * tokens / takes(asked)
    for drafts in sizes[1:]:
        made = tokens + sum([expected(acceptance, min(drafts, room)) for acceptance, room in adaptive])
        rate = made / takes(max(drafts, asked))
        if rate > most:
            best, most = drafts, rate
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
    """Chooses, step by step. `times`: what steps take."""

    def __init__(self, measured: Sequence[tuple[int, int, float]] = ()) -> None:
        self.times = StepTimes(measured)
        self._paused = 0
        self._resting: tuple[int, int] | None = None  # the sequences and the newest one that rest
        self._rested = 0
        self._looks: dict[int, int] = {}  # sequences -> steps without drafts for the sake of seeing one

    def rests(self, sequences: int, newest: int) -> bool:
        """Whether a step needs no choice: a step of as many sequences with the same newest one (its number) was just
        found to go without drafts. To be called before `choose`.
        """
        if not self.times.known:
            return False
        if self._resting != (sequences, newest) or self._rested >= REST or self._paused >= PAUSE - 1:
            self._resting, self._rested = (sequences, newest), 0
            return False
        self._rested += 1
        self._paused += 1
        return True

    def choose(self, entries: Sequence[Entry], most: int, ahead: bool = False) -> int:
        """Drafts of each adaptive sequence in the next step, at most `most`; to be called once for each step that does
        not rest. `ahead`: another step is with the device, so that it shows what a step takes.
        """
        chosen = self._choose(entries, most, ahead)
        if chosen or not all(speculation is None or speculation.adaptive for speculation, _ in entries):
            self._resting = None
        return chosen

    def _choose(self, entries: Sequence[Entry], most: int, ahead: bool) -> int:
        adaptive = [entry for entry in entries if entry[0] is not None and entry[0].adaptive and entry[1] > 0]
        if not adaptive:
            return 0
        fixed = [entry for entry in entries if entry[0] is not None and not entry[0].adaptive and entry[1] > 0]
        chances = _chances(adaptive)
        seconds = {drafts: took for drafts, took in self.times.of(len(entries)).items() if drafts <= most}
        if seconds:
            tokens = len(entries) + sum(expected(*chance) for chance in _chances(fixed))
            chosen = fastest(seconds, tokens, chances, max((room for _, room in fixed), default=0))
            if chosen and ahead and not fixed and self._looks_at(len(entries)):
                self._resting = None
                return 0
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

    def _looks_at(self, sequences: int) -> bool:
        """Whether a step should go without drafts because none such was seen: it alone shows what they gain."""
        if self.times.seen(sequences, 0):
            self._looks.pop(sequences, None)
            return False
        self._looks[sequences] = self._looks.get(sequences, 0) + 1
        return self._looks[sequences] <= LOOK


def _chances(entries: Sequence[Entry]) -> list[tuple[float, int]]:
    return [(speculation.acceptance, room) for speculation, room in entries if speculation is not None]
