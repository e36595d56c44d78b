"""Recovery from a failed step: find lost keys and values, and the sequence that makes a step fail.

The failed step's sequences are computed again in smaller and smaller groups until one fails alone.
"""

from collections import deque
from collections.abc import Iterable

from ...ops.core.kv_layout import PAGE_SIZE
from .sequence import Sequence, Status
from .step_plan import StepPlan

STEP_FAULT = "the step that computed this request failed on the device; send it again"
IssuedStep = tuple[StepPlan, list[Sequence]]  # a plan and its sequences, in the order of its rows


class Suspects:
    """Groups of sequences that may have caused a failed step.

    Only the first group is computed, until all its sequences are past the point of the failed step; other sequences
    wait, so that they cannot be affected. The faulty one of N is found in about 2 log2(N) steps.
    """

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()
        self._until: dict[Sequence, int] = {}  # tokens to store before a sequence is cleared

    def __bool__(self) -> bool:
        return any(not sequence.finished for group in self._groups for sequence in group)

    def add(self, failed: dict[Sequence, int]) -> Sequence | None:
        """Add the running sequences of a failed step, with the number of tokens that it was to store.

        Return the faulty sequence if it was alone.
        """
        others: list[Sequence] = []
        if self._groups and any(sequence in failed for sequence in self._groups[0]):
            others = [sequence for sequence in self._groups.popleft() if sequence not in failed]
        if others:
            self._groups.appendleft(others)
        if len(failed) == 1:
            (faulty,) = failed
            self._until.pop(faulty, None)
            return faulty
        self._until |= failed
        # a sequence without output is the likelier cause, because it is new
        new = [sequence for sequence in failed if len(sequence.tokens) == sequence.prompt_length]
        old = [sequence for sequence in failed if len(sequence.tokens) > sequence.prompt_length]
        if not new or not old:
            both = new or old
            new, old = both[: len(both) // 2], both[len(both) // 2 :]
        self._groups.extendleft(group for group in (old, new) if group)
        return None

    def add_alone(self, sequence: Sequence) -> None:
        """Add a `HELD` sequence, which gets steps of its own until all its known tokens are stored."""
        self._until[sequence] = len(sequence.tokens)
        self._groups.append([sequence])

    def held(self, number: int) -> list[Sequence]:
        """Return the waiting suspects with this adapter (by number)."""
        return [
            sequence
            for group in self._groups
            for sequence in group
            if sequence.number == number and sequence.status is Status.HELD
        ]

    @property
    def request_ids(self) -> set[str]:
        """Ids of the suspected requests."""
        return {sequence.request_id for group in self._groups for sequence in group if not sequence.finished}

    def current_group(self) -> list[Sequence]:
        """Return the unfinished sequences of the first group. Call it between two steps.

        A group is cleared once all its sequences are past the point of the failed step.
        """
        while self._groups:
            group = [sequence for sequence in self._groups[0] if not sequence.finished]
            if any(self.tokens_left(sequence) > 0 for sequence in group):
                self._groups[0] = group
                return group
            for sequence in self._groups.popleft():
                self._until.pop(sequence, None)
        return []

    def tokens_left(self, sequence: Sequence) -> int:
        """Return how many more tokens must be stored to clear the sequence."""
        return self._until[sequence] - sequence.computed

    def defer(self, sequences: list[Sequence]) -> None:
        """Move members of the first group, which do not fit next to the others, to a group of their own."""
        self._groups[0] = [sequence for sequence in self._groups[0] if sequence not in sequences]
        self._groups.insert(1, sequences)


def find_lost(failed: IssuedStep, later: list[IssuedStep], running: list[Sequence]) -> tuple[list[Sequence], set[int]]:
    """Return (sequences with missing or wrong keys and values, pages that hold such).

    `later`: plans issued after the failed one. They compute from what it should have stored, and other sequences may
    read their pages through the prefix cache.
    """
    lost = set(failed[1])
    while True:
        pages = {
            page
            for plan, sequences in (failed, *later)
            for page in written_pages(plan, [row for row, sequence in enumerate(sequences) if sequence in lost])
        }
        readers = {sequence for sequence in running if not pages.isdisjoint(sequence.pages)}
        if readers <= lost:
            return sorted(lost, key=lambda sequence: sequence.order), pages
        lost |= readers


def written_pages(plan: StepPlan, rows: Iterable[int] | None = None) -> set[int]:
    """Return the pages that a plan may write for the sequences in `rows`; None: for all."""
    starts, ends = plan.positions[plan.query_start[:-1]] // PAGE_SIZE, -(-plan.context_lens // PAGE_SIZE)
    return {
        page
        for row in (range(plan.num_sequences) if rows is None else rows)
        for page in plan.block_table[row, starts[row] : ends[row]].tolist()
    }
