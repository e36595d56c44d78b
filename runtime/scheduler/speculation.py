"""Number of drafts in a step, from acceptance rates and step times.

All sequences with speculation="auto" get the same number, because the largest number decides which program runs.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from .step_plan import DRAFT_SIZES, FORMER_ANSWERS, OWN_TOKENS, TRAINED_DRAFT

FIRST_ACCEPTANCE = 0.5
WINDOW = 8
"""Steps over which a sequence's acceptance is averaged."""
ADAPTER_WINDOW = 64
"""Steps over which the acceptance of an adapter's sequences is averaged."""
DISCOUNT = 0.25
"""Remaining weight of old observations when drafts are retried."""

MIN_SPEEDUP = 1.05
"""Minimum expected speedup over a step without drafts, because step times are known only roughly."""
MIN_ACCEPTED = dict(zip(DRAFT_SIZES, (0.25, 0.8, 2.5), strict=True))
"""Without step times: number of drafts -> minimum expected number of accepted ones per sequence."""
RETRY_AFTER = 64
"""Steps without drafts after which drafts are tried again."""
SKIP_STEPS = 8
"""Steps that reuse the decision for no drafts while the batch is the same."""
MAX_PROBES = 10
"""Steps without drafts, at most, that only measure the time of such a step at one batch size."""

TIME_WINDOW = 16
"""Number of recent steps of a kind for the median time."""
MIN_SAMPLES = 4
"""Steps of a kind that must be measured before they count."""
MAX_AGE = 1024
"""Steps after which a measurement expires, because contexts and load change. Probes for new measurements are at most
MAX_PROBES / MAX_AGE, about 1%, of all steps.
"""

Kind = tuple[int, int]
"""Sequences and drafts per sequence of the program that a step runs in."""


@dataclass(slots=True)
class DraftCounts:
    """Drafts that were computed (`drafted`) and those that became output (`accepted`): all of them, those from former
    answers (`history_*`) and those from a trained draft (`trained_*`). `rounds`: steps of a sequence with drafts.
    """

    drafted: int = 0
    accepted: int = 0
    history_drafted: int = 0
    history_accepted: int = 0
    trained_drafted: int = 0
    trained_accepted: int = 0
    rounds: int = field(default=0, compare=False)

    def add(self, drafted: int, accepted: int, source: int) -> None:
        """Count one sequence's drafts of a step; `source`: OWN_TOKENS, FORMER_ANSWERS or TRAINED_DRAFT."""
        self.rounds += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        if source == FORMER_ANSWERS:
            self.history_drafted += drafted
            self.history_accepted += accepted
        elif source == TRAINED_DRAFT:
            self.trained_drafted += drafted
            self.trained_accepted += accepted

    @classmethod
    def total(cls, counts: Iterable[Self]) -> Self:
        """Return the sum."""
        each = list(counts)
        return cls(*(sum(getattr(one, name.name) for one in each) for name in fields(cls)))


@dataclass(slots=True)
class Acceptance:
    """Probability that a draft is accepted if those before it are, as a moving average over about `window` steps."""

    window: int
    accepted: float = FIRST_ACCEPTANCE
    tried: float = 1.0

    @property
    def rate(self) -> float:
        """From 0 to 1."""
        return self.accepted / self.tried

    def add(self, drafts: int, accepted: int) -> None:
        """Add a step's drafts; those after the first rejected one were not tried."""
        self.accepted += (accepted - self.accepted) / self.window
        self.tried += (accepted + (accepted < drafts) - self.tried) / self.window


@dataclass(slots=True)
class Speculation:
    """Drafts of one sequence.

    max_drafts  most drafts in a step
    adaptive    get as many as pay for the whole step (`DraftPlanner`) instead of `max_drafts`
    """

    max_drafts: int
    adaptive: bool = False
    counts: DraftCounts = field(default_factory=DraftCounts)
    _recent: Acceptance = field(default_factory=lambda: Acceptance(WINDOW))

    @property
    def acceptance(self) -> float:
        """Probability that a draft is accepted if those before it are."""
        return self._recent.rate

    def expect(self, acceptance: float) -> None:
        """Set the acceptance that is assumed before the first draft."""
        self._recent.accepted = acceptance * self._recent.tried

    def add(self, drafts: int, accepted: int, source: int = OWN_TOKENS) -> None:
        """Add the drafts of a committed step; `source` as in `DraftCounts.add`."""
        self.counts.add(drafts, accepted, source)
        self._recent.add(drafts, accepted)

    def discount(self) -> None:
        """Reduce the weight of old observations, so that new ones count more."""
        self._recent.accepted, self._recent.tried = self.acceptance * DISCOUNT, DISCOUNT


class AdapterAcceptance:
    """Expected acceptance of new sequences: that of former sequences with the same adapter."""

    def __init__(self) -> None:
        self._of: dict[int, Acceptance] = {}

    def start(self, speculation: Speculation, number: int) -> None:
        """Initialize a sequence that starts to run; `number`: its adapter, -1 = the base model."""
        known = self._of.get(number)
        if known is not None and not speculation.counts.drafted:  # a resumed sequence keeps its own acceptance
            speculation.expect(known.rate)

    def add(self, number: int, drafts: int, accepted: int) -> None:
        """Add the drafts of a committed step."""
        self._of.setdefault(number, Acceptance(ADAPTER_WINDOW)).add(drafts, accepted)

    def forget(self, number: int) -> None:
        """Drop an unused adapter."""
        self._of.pop(number, None)


def max_drafts(option: str | int) -> int:
    """Return the most drafts of a sequence for the option "off", "auto" or a number."""
    return option if isinstance(option, int) else DRAFT_SIZES[-1] if option == "auto" else 0


def make_speculation(option: str | int, limit: int) -> Speculation | None:
    """Return the Speculation for an option, with at most `limit` drafts; None for no drafts."""
    drafts = min(max_drafts(option), limit)
    return Speculation(drafts, option == "auto") if drafts else None


class StepTimes:
    """Expected time of a step by its number of sequences and drafts.

    measured  (sequences, rows per sequence, seconds) of timed programs, one row without drafts

    A step takes longer than its program, by an overhead that depends on the model, the host and the number of drafts.
    The overhead is the median of measured steps of the same kind, else that of the most similar kind.
    """

    def __init__(self, measured: Sequence[tuple[int, int, float]]) -> None:
        self._by_rows: dict[int, list[tuple[int, float]]] = {}
        for sequences, rows, seconds in sorted(measured):
            self._by_rows.setdefault(rows, []).append((sequences, seconds))
        self._sizes = [size for size, _ in self._by_rows.get(1, ())]
        self._programs: dict[int, dict[int, float]] = {}
        self._samples: dict[Kind, deque[tuple[int, float]]] = {}
        self._overhead: dict[Kind, float] = {}
        self._expected: dict[int, dict[int, float]] = {}
        self._planned: dict[int, Kind] = {}
        self._last: tuple[int, Kind | None, float] = (-1, None, 0.0)  # step, kind and time of the last committed step
        self._oldest = 0

    @property
    def available(self) -> bool:
        """Whether any program was timed."""
        return bool(self._sizes)

    def expected(self, sequences: int) -> Mapping[int, float]:
        """Return number of drafts -> seconds of a step, for all numbers that have programs; empty if a step without
        drafts was not timed.
        """
        size = self._size(sequences)
        if size not in self._expected:
            programs = self._program_times(size)
            self._expected[size] = {
                drafts: seconds + self._expected_overhead(size, drafts) for drafts, seconds in programs.items()
            }
        return self._expected[size]

    def is_measured(self, sequences: int, drafts: int) -> bool:
        """Return whether enough such steps were measured recently."""
        return (self._size(sequences), drafts) in self._overhead

    def plan(self, step: int, sequences: int, drafts: int) -> None:
        """Note a planned decode step; `drafts`: of the sequence with the most. Call it only if another step is in
        flight: else the device waited for the plan, and the step's time is not measured.
        """
        self._planned[step] = self._size(sequences), next((size for size in DRAFT_SIZES if size >= drafts > 0), 0)

    def commit(self, step: int, now: float) -> None:
        """Measure a step by the time since the step before it; `now`: clock time in seconds."""
        if not self._sizes:
            return
        kind = self._planned.pop(step, None)
        last_step, last_kind, last_time = self._last
        self._last = step, kind, now
        # after a step of another kind the interval holds a part of that step
        if kind is not None and kind == last_kind and step == last_step + 1 and now > last_time:
            self._add(kind, step, now - last_time)
        if step - self._oldest > MAX_AGE:
            self._expire(step)

    def fail(self, step: int) -> None:
        """Forget a step without a result."""
        self._planned.pop(step, None)
        self._last = step, None, 0.0

    def _size(self, sequences: int) -> int:
        """Return the size of the decode program for this number of sequences; 0 if there is none."""
        place = bisect_left(self._sizes, sequences)
        return self._sizes[place] if place < len(self._sizes) else 0

    def _program_times(self, size: int) -> dict[int, float]:
        """Return number of drafts -> seconds of the program."""
        if size not in self._programs:
            times = {
                rows - 1: next((seconds for other, seconds in sizes if other >= size), 0.0)
                for rows, sizes in sorted(self._by_rows.items())
            }
            timed = {drafts: seconds for drafts, seconds in times.items() if seconds > 0}
            self._programs[size] = timed if size and 0 in timed else {}
        return self._programs[size]

    def _expected_overhead(self, size: int, drafts: int) -> float:
        if (size, drafts) in self._overhead:
            return self._overhead[size, drafts]
        similar = [
            (bool(other) != bool(drafts), abs(self._sizes.index(sequences) - self._sizes.index(size)), seconds)
            for (sequences, other), seconds in self._overhead.items()
            if drafts or not other  # steps with drafts do not predict a step without
        ]
        return min(similar)[-1] if similar else 0.0

    def _add(self, kind: Kind, step: int, seconds: float) -> None:
        samples = self._samples.setdefault(kind, deque(maxlen=TIME_WINDOW))
        samples.append((step, seconds))
        if len(samples) >= MIN_SAMPLES:
            size, drafts = kind
            program = self._program_times(size).get(drafts)
            if program is not None:
                median = sorted(seconds for _, seconds in samples)[len(samples) // 2]
                self._overhead[kind] = max(0.0, median - program)
                self._expected.clear()

    def _expire(self, step: int) -> None:
        for kind, samples in list(self._samples.items()):
            while samples and step - samples[0][0] > MAX_AGE:
                samples.popleft()
            if len(samples) < MIN_SAMPLES:
                self._overhead.pop(kind, None)
        self._expected.clear()
        self._oldest = min((samples[0][0] for samples in self._samples.values() if samples), default=step)


Entry = tuple[Speculation | None, int]
"""A sequence's speculation and the most drafts that fit in this step."""


def expected_accepted(acceptance: float, drafts: int) -> float:
    """Return the expected number of accepted drafts if each is accepted with probability `acceptance` after those
    before it were.
    """
    return float(drafts) if acceptance >= 1 else acceptance * (1 - acceptance**drafts) / (1 - acceptance)


def fastest_drafts(
    seconds: Mapping[int, float], tokens: float, adaptive: Sequence[tuple[float, int]], fixed: int = 0
) -> int:
    """Return the number of drafts with the most expected tokens per second; 0 unless it beats a step without drafts by
    MIN_SPEEDUP.

    seconds   number of drafts -> expected time of a step; has 0
    tokens    expected tokens of a step in which the `adaptive` sequences have no drafts
    adaptive  (acceptance, most drafts) of each sequence that gets the number
    fixed     most drafts of the other sequences
    """
    shortest: dict[int, float] = {}  # a larger program may be the faster one
    best_time = float("inf")
    for drafts in sorted(seconds, reverse=True):
        best_time = shortest[drafts] = min(best_time, seconds[drafts])
    sizes = sorted(seconds)

    def step_time(drafts: int) -> float:
        return shortest[next((size for size in sizes if size >= drafts), sizes[-1])] if drafts else shortest[0]

    best, best_rate = 0, MIN_SPEEDUP * tokens / step_time(fixed)
    for drafts in sizes[1:]:
        expected = tokens + sum([expected_accepted(acceptance, min(drafts, most)) for acceptance, most in adaptive])
        rate = expected / step_time(max(drafts, fixed))
        if rate > best_rate:
            best, best_rate = drafts, rate
    return best


def drafts_without_times(sequences: int, adaptive: Sequence[tuple[float, int]], limit: int) -> int:
    """Return the largest number of drafts, up to `limit`, that reaches MIN_ACCEPTED per sequence on average. Of the
    `sequences` those not in `adaptive` count as accepting none.
    """
    for drafts in reversed(DRAFT_SIZES):
        accepted = sum(expected_accepted(acceptance, min(drafts, most)) for acceptance, most in adaptive)
        if drafts <= limit and accepted >= MIN_ACCEPTED[drafts] * sequences:
            return drafts
    return 0


class DraftPlanner:
    """Chooses the number of drafts of each step. `measured`: see `StepTimes`."""

    def __init__(self, measured: Sequence[tuple[int, int, float]] = ()) -> None:
        self.times = StepTimes(measured)
        self._without = 0  # steps since the last drafts
        self._skipping: tuple[int, int] | None = None  # the batch that needs no drafts: sequences and newest arrival
        self._skipped = 0
        self._probes: dict[int, int] = {}  # sequences -> probing steps

    def skips(self, sequences: int, newest: int) -> bool:
        """Return whether the step reuses a recent decision for no drafts, because it has as many sequences and the same
        newest one (`newest`: its arrival number). Call it before `choose`.
        """
        if not self.times.available:
            return False
        if self._skipping != (sequences, newest) or self._skipped >= SKIP_STEPS or self._without >= RETRY_AFTER - 1:
            self._skipping, self._skipped = (sequences, newest), 0
            return False
        self._skipped += 1
        self._without += 1
        return True

    def choose(self, entries: Sequence[Entry], limit: int, ahead: bool = False) -> int:
        """Return the number of drafts of each adaptive sequence in the next step, at most `limit`. Call it once for
        each step that is not skipped. `ahead`: another step is in flight, so that this step's time will be measured.
        """
        chosen = self._choose(entries, limit, ahead)
        if chosen or not all(speculation is None or speculation.adaptive for speculation, _ in entries):
            self._skipping = None
        return chosen

    def _choose(self, entries: Sequence[Entry], limit: int, ahead: bool) -> int:
        used = [(speculation, most) for speculation, most in entries if speculation is not None and most > 0]
        adaptive = [speculation for speculation, _ in used if speculation.adaptive]
        if not adaptive:
            return 0
        chances = [(speculation.acceptance, most) for speculation, most in used if speculation.adaptive]
        fixed = [(speculation.acceptance, most) for speculation, most in used if not speculation.adaptive]
        seconds = {drafts: time for drafts, time in self.times.expected(len(entries)).items() if drafts <= limit}
        if seconds:
            tokens = len(entries) + sum(expected_accepted(*chance) for chance in fixed)
            chosen = fastest_drafts(seconds, tokens, chances, max((most for _, most in fixed), default=0))
            if chosen and ahead and not fixed and self._probe(len(entries)):
                self._skipping = None
                return 0
        else:
            chosen = drafts_without_times(len(entries) - len(fixed), chances, limit)
        if chosen:
            self._without = 0
            return chosen
        self._without += 1
        if self._without < RETRY_AFTER:
            return 0
        self._without = 0
        for speculation in adaptive:
            speculation.discount()
        return DRAFT_SIZES[0]

    def _probe(self, sequences: int) -> bool:
        """Return whether the step should have no drafts, to measure the time of a step without drafts."""
        if self.times.is_measured(sequences, 0):
            self._probes.pop(sequences, None)
            return False
        self._probes[sequences] = self._probes.get(sequences, 0) + 1
        return self._probes[sequences] <= MAX_PROBES
