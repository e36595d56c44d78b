"""What a failed step takes with it."""

from ...ops.core.kv_layout import PAGE_SIZE
from ..steps.plan import StepPlan
from .sequence import Sequence

STEP_FAULT = "the step that computed this request failed on the device; send it again"
Issued = tuple[StepPlan, list[Sequence]]  # a plan and its sequences, in the order of its rows


def what_is_lost(failed: Issued, later: list[Issued], running: list[Sequence]) -> tuple[list[Sequence], set[int]]:
    """(sequences whose keys and values are wrong or missing, pages with such keys and values).

    `later`: plans that were issued behind the failed one, which go on computing from what it should have stored.
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
    """The pages that a plan writes for some of its sequences."""
    ends = plan.query_start.tolist()
    slots: list[int] = []
    for row, sequence in enumerate(sequences):
        if sequence in writers:
            slots += plan.slot_mapping[ends[row] : ends[row + 1]].tolist()
    return {slot // PAGE_SIZE for slot in slots}
