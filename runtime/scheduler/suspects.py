"""What a failed step takes with it (`what_is_lost`), and whose fault it was (`Suspects`): its sequences are computed
again in smaller and smaller groups, until one fails alone.
"""

from collections import deque

from ...ops.core.kv_layout import PAGE_SIZE
from .sequence import Sequence, Status
from .step_plan import StepPlan

STEP_FAULT = "the step that computed this request failed on the device; send it again"
Issued = tuple[StepPlan, list[Sequence]]  # a plan and its sequences, in the order of its rows


class Suspects:
    """Groups of sequences; the first is on trial: it alone is computed, until all its sequences have got past the point
    where the failed step was.

    While there are suspects no step holds anybody else, so that nobody else can be hurt. One among N is found in about
    2 log2(N) steps.
    """

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()
        self._until: dict[Sequence, int] = {}  # tokens that must be stored before a sequence is beyond suspicion

    def __bool__(self) -> bool:
        return any(not sequence.finished for group in self._groups for sequence in group)

    def accuse(self, accused: dict[Sequence, int]) -> Sequence | None:
        """The running sequences of a failed step, and how many tokens of each it was to store.

        Returns the guilty one if there is only one.
        """
        rest: list[Sequence] = []
        if self._groups and any(sequence in accused for sequence in self._groups[0]):
            rest = [sequence for sequence in self._groups.popleft() if sequence not in accused]
        if rest:
            self._groups.appendleft(rest)
        if len(accused) == 1:
            (guilty,) = accused
            self._until.pop(guilty, None)
            return guilty
        self._until |= accused
        # likelier than those that were computed before
        new = [sequence for sequence in accused if len(sequence.tokens) == sequence.prompt_length]
        old = [sequence for sequence in accused if len(sequence.tokens) > sequence.prompt_length]
        if not new or not old:
            both = new or old
            new, old = both[: len(both) // 2], both[len(both) // 2 :]
        self._groups.extendleft(group for group in (old, new) if group)
        return None

    def try_alone(self, sequence: Sequence) -> None:
        """One that is `HELD` from the start: it has a step to itself until all that is known of it is stored."""
        self._until[sequence] = len(sequence.tokens)
        self._groups.append([sequence])

    def held(self, number: int) -> list[Sequence]:
        """Those that wait for their trial with this adapter (by number)."""
        return [
            sequence
            for group in self._groups
            for sequence in group
            if sequence.number == number and sequence.status is Status.HELD
        ]

    @property
    def request_ids(self) -> set[str]:
        """The requests that are suspected."""
        return {sequence.request_id for group in self._groups for sequence in group if not sequence.finished}

    def on_trial(self) -> list[Sequence]:
        """The first group's sequences that are not finished.

        To be called between two steps: who is past the point by now is cleared with the whole group.
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
        """How many more tokens of it must be stored."""
        return self._until[sequence] - sequence.computed

    def put_off(self, sequences: list[Sequence]) -> None:
        """These members of the first group have no room next to the others: they are tried by themselves later."""
        self._groups[0] = [sequence for sequence in self._groups[0] if sequence not in sequences]
        self._groups.insert(1, sequences)


def what_is_lost(failed: Issued, later: list[Issued], running: list[Sequence]) -> tuple[list[Sequence], set[int]]:
    """(sequences whose keys and values are wrong or missing, pages with such keys and values).

    `later`: plans that were issued after the failed one, which go on computing from what it should have stored.
    Through the prefix cache other sequences may read it too, and so on.
    """
    lost = set(failed[1])
    while True:
        pages = {page for plan, sequences in (failed, *later) for page in _written(plan, sequences, lost)}
        readers = {sequence for sequence in running if not pages.isdisjoint(sequence.pages)}
        if readers <= lost:
            return sorted(lost, key=lambda sequence: sequence.order), pages
        lost |= readers


def _written(plan: StepPlan, sequences: list[Sequence], writers: set[Sequence]) -> set[int]:
    """The pages that a plan writes for some of its sequences, or may write."""
    starts, ends = plan.positions[plan.query_start[:-1]] // PAGE_SIZE, -(-plan.context_lens // PAGE_SIZE)
    return {
        page
        for row, sequence in enumerate(sequences)
        if sequence in writers
        for page in plan.block_table[row, starts[row] : ends[row]].tolist()
    }
