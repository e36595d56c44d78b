"""Handle of a submitted step: its results on their way to the host."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..scheduler.step_plan import Int32, StepDrafts, StepPlan, StepResult
from .sampler import DeviceSamples
from .speculation.spec_decode_graphs import VerifyResult
from .staging import to_host


@dataclass
class StepHandle:
    """A submitted step.

    samples    copies in pinned memory, valid after the event `done`; with speculation `tokens` holds `verified.packed`
    unsampled  arguments for sampling while the step waits for masks
    compiled   see `StepResult`
    """

    plan: StepPlan
    samples: DeviceSamples | None = None
    done: Any = None
    verified: VerifyResult | None = None
    unsampled: Any = None
    compiled: int = 0
    _drafts: tuple[torch.Tensor, Any, Int32] | None = None  # a copy, its event, and the rows that need masks

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.plan.step

    def send_drafts(self, drafts: torch.Tensor, persistent: bool) -> None:
        """Copy the drafts to the host, for masks that depend on them; `persistent`: see `to_host`."""
        (copy,), ready = to_host([drafts], drafts.device, persistent)
        self._drafts = copy, ready, self.plan.masked_rows

    def send(self, samples: DeviceSamples | None, verified: VerifyResult | None = None) -> None:
        """Copy the samples to the host. With `verified` it supplies the tokens; `samples` may then be None."""
        if verified is not None:
            samples = DeviceSamples(verified.packed) if samples is None else replace(samples, tokens=verified.packed)
        tensors = {name: tensor for name, tensor in vars(samples).items() if tensor is not None}
        persistent = verified is not None and verified.persistent
        copies, self.done = to_host(tensors.values(), tensors["tokens"].device, persistent)
        self.samples, self.verified = DeviceSamples(**dict(zip(tensors, copies, strict=True))), verified

    def drafts(self) -> StepDrafts:
        """Wait for the drafts."""
        if self._drafts is None:
            raise RuntimeError(f"step {self.step} has no drafts that masks depend on")
        drafts, ready, rows = self._drafts
        if ready is not None:
            ready.synchronize()
        return StepDrafts(self.step, drafts.numpy()[rows])

    def result(self) -> StepResult:
        """Wait for the samples."""
        if self.done is not None:
            self.done.synchronize()
        if self.samples is None:
            raise RuntimeError(f"step {self.step} was not sampled: it waits for masks")
        arrays = {name: tensor.numpy() for name, tensor in vars(self.samples).items() if tensor is not None}
        if self.verified is not None:
            tokens, accepted, sources = self.verified.unpack(arrays["tokens"], self.plan)
            arrays["tokens"] = tokens
            return StepResult(self.step, **arrays, accepted=accepted, sources=sources, compiled=self.compiled)
        return StepResult(self.step, **arrays, compiled=self.compiled)
