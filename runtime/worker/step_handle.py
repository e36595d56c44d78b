"""A step on its way: what goes back to the host, and when it is there."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..scheduler.step_plan import Int32, StepDrafts, StepPlan, StepResult
from .inputs.staging import to_host
from .sampler import DeviceSamples
from .spec_decode_graphs import Counted


@dataclass
class Handle:
    """`samples`: copies of what the step sampled, in pinned memory, and `done`, the event after which they are valid.
    Of a plan that follows its sequences they have the copy of `counted.whole` in place of tokens. `unsampled`: what
    samples the step while it waits for masks. `compiled`: see `StepResult`.
    """

    plan: StepPlan
    samples: DeviceSamples | None = None
    done: Any = None
    counted: Counted | None = None
    unsampled: Any = None
    compiled: int = 0
    _drafted: tuple[torch.Tensor, Any, Int32] | None = None  # a copy, its event, and the rows that count

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.plan.step

    def send_drafts(self, drafts: torch.Tensor, lasting: bool) -> None:
        """Send the drafts to the host, for masks that depend on them; `lasting`: see `to_host`."""
        (copy,), found = to_host([drafts], drafts.device, lasting)
        self._drafted = copy, found, self.plan.masked_rows

    def send(self, samples: DeviceSamples | None, counted: Counted | None = None) -> None:
        """Send what was sampled to the host. `counted`: has the tokens of a plan that follows its sequences; without
        `samples` there is nothing else.
        """
        if counted is not None:
            samples = DeviceSamples(counted.whole) if samples is None else replace(samples, tokens=counted.whole)
        given = {name: tensor for name, tensor in vars(samples).items() if tensor is not None}
        copies, self.done = to_host(given.values(), given["tokens"].device, counted is not None and counted.lasting)
        self.samples, self.counted = DeviceSamples(**dict(zip(given, copies, strict=True))), counted

    def drafts(self) -> StepDrafts:
        """Wait for the drafts."""
        if self._drafted is None:
            raise RuntimeError(f"step {self.step} has no drafts that masks depend on")
        drafts, found, rows = self._drafted
        if found is not None:
            found.synchronize()
        return StepDrafts(self.step, drafts.numpy()[rows])

    def result(self) -> StepResult:
        """Wait for the tokens."""
        if self.done is not None:
            self.done.synchronize()
        if self.samples is None:
            raise RuntimeError(f"step {self.step} was not sampled: it waits for masks")
        arrays = {name: tensor.numpy() for name, tensor in vars(self.samples).items() if tensor is not None}
        if self.counted is not None:
            tokens, accepted, sources = self.counted.on_host(arrays["tokens"], self.plan)
            arrays["tokens"] = tokens
            return StepResult(self.step, **arrays, accepted=accepted, sources=sources, compiled=self.compiled)
        return StepResult(self.step, **arrays, compiled=self.compiled)
