"""What executes plans, as scheduler, engine and GPU process see it."""

from typing import Any, Protocol

from .step_plan import StepDrafts, StepMasks, StepPlan, StepResult


class Runner(Protocol):
    """Executes plans in the order in which they are submitted, and copies adapters while they run.

    Adapters go by their numbers in the adapter registry. A scheduler without asynchronous loads uses `submit` and
    `collect` alone.
    """

    def submit(self, plan: StepPlan) -> Any:
        """Start a step; returns at once where the device works by itself."""
        ...

    def drafts(self, handle: Any) -> StepDrafts:
        """Wait for the drafts of a submitted step whose plan has `masks_drafts`: they are found before the step's
        logits are computed.
        """
        ...

    def constrain(self, handle: Any, masks: StepMasks) -> None:
        """The masks of the last submitted step, whose plan has `masked_rows`: it is sampled now. No step is submitted
        before.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a submitted step. Steps are collected in order."""
        ...

    def start_load(self, slot: int, number: int) -> None:
        """Start copying an adapter into a slot that no running step uses; slot -1: only make it ready in host
        memory.
        """
        ...

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """(slot, number, None or what went wrong) of copies that ended since the last call; waits up to `timeout`
        seconds for the first.
        """
        ...

    def forget_adapter(self, number: int) -> None:
        """Drop an adapter that nothing uses any more."""
        ...
