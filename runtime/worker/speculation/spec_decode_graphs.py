"""Speculative decoding around a program: place drafts before it, sample and accept drafts after it.

If the program is a CUDA graph, both parts are graphs too, because the host needs more time to launch their small
kernels than the device to run them.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ....compiler.program.program import Bucket
from ....compiler.run.cuda_graph import capture
from ....ops.elementwise.argmax import argmax
from ...scheduler.step_plan import Int32, StepMasks, StepPlan
from ..sampler import PARAMETERS, draw
from ..step_inputs import ExtraInput, StepInputs
from .token_history import TokenHistory


@dataclass(frozen=True)
class VerifyResult:
    """A step's sampled tokens [N], accepted drafts [S] and draft sources [S] (if any), int32 on the device.

    packed      all of them in one tensor, which is copied to the host
    persistent  each step writes to the same memory, so it must be copied before the next step
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    packed: torch.Tensor
    persistent: bool = False

    def unpack(self, packed: Int32, plan: StepPlan) -> tuple[Int32, Int32, Int32 | None]:
        """Return tokens, accepted and sources of the plan's sequences from a host copy of `packed`."""
        rows, count = len(self.tokens), plan.num_sequences
        rest = packed[rows:].reshape(-1, len(self.accepted))
        return packed[: len(plan.sampling.temperature)], rest[0, :count], rest[1, :count] if len(rest) > 1 else None


def extra_inputs(history: TokenHistory) -> tuple[ExtraInput, ...]:
    """Return the arrays that speculation adds to a step's inputs: of its history, and for sampling."""
    return (*history.extra_inputs, *(ExtraInput(name, dtype, 0, per_row=True) for name, dtype in PARAMETERS))


class SpecDecodeGraphs:
    """The parts before and after one program. `inputs`: the program's, with `extra_inputs`; `logits`: its output.

    A step calls `input_values`, `place`, the program, and then `sample` (if `captured` and only tokens of unedited
    logits are needed) or `accept`.

    drafts  [S, K] int32: the drafts of the last `place`
    copied  event after which the last `VerifyResult` has been copied to the host, set by the caller
    """

    def __init__(self, history: TokenHistory, bucket: Bucket, inputs: StepInputs, logits: torch.Tensor) -> None:
        self._history, self._bucket, self._inputs, self._logits = history, bucket, inputs, logits
        self.drafts = inputs.staged["rows"].new_empty(bucket.sequences, 0)
        self.captured = False
        self.copied: Any = None
        self._sources: torch.Tensor | None = None
        self._graphs: _Graphs | None = None

    def input_values(self, plan: StepPlan) -> dict[str, Any]:
        """Return the values of `extra_inputs` for a step."""
        values: dict[str, Any] = dict(self._history.input_values(plan))
        if self._graphs is not None and not plan.sampling.greedy:
            values |= {name: getattr(plan.sampling, name) for name, _ in PARAMETERS}
        return values

    def place(self, plan: StepPlan) -> None:
        """Draft, and complete the inputs of this step, which are staged."""
        graphs = self._graphs
        self.captured = graphs is not None and self._history.uses_default_ops
        if graphs is not None and self.captured:
            graphs.before.replay()
            self.drafts, self._sources = graphs.drafts, graphs.sources
        elif (plan.drafts >= 0).any():
            self.drafts, self._sources = self._place()
        else:  # the plan has all inputs
            self.drafts, self._sources = self.drafts[:, :0], None

    def sample(self, plan: StepPlan) -> VerifyResult:
        """Sample all rows and accept drafts; only if `captured`."""
        if self._graphs is None:
            raise RuntimeError("sampling was not captured; call `accept`")
        if self.copied is not None:
            torch.cuda.current_stream(self._logits.device).wait_event(self.copied)
        (self._graphs.greedy if plan.sampling.greedy else self._graphs.drawn).replay()
        return self._graphs.result

    def accept(self, tokens: torch.Tensor, plan: StepPlan, masks: StepMasks | None = None) -> VerifyResult:
        """Accept drafts given the step's sampled tokens [N]; a constrained sequence needs a mask after each of them."""
        limits = None if masks is None or not plan.masks_drafts else self._history.draft_limits(plan, masks)
        accepted = self._history.accept(self._inputs.staged, self.drafts, tokens, limits)
        sources = () if self._sources is None else (self._sources[: len(accepted)],)
        return VerifyResult(tokens, accepted, torch.cat((tokens, accepted, *sources)))

    def capture(self, pool: Any) -> Any:
        """GPU only: capture both parts and return their memory pool. Clear the inputs first to store nothing."""
        staged = self._inputs.staged
        device, size, rows = self._logits.device, self._bucket.sequences, len(self._logits)
        # outside the pool: another graph may overwrite memory of the pool
        drafts = torch.zeros(size, self._bucket.rows - 1, dtype=torch.int32, device=device)
        sources = torch.zeros(size, dtype=torch.int32, device=device) if self._history.has_sources else None
        packed = torch.zeros(rows + size * (1 if sources is None else 2), dtype=torch.int32, device=device)

        def place() -> None:
            new_drafts, new_sources = self._place()
            drafts.copy_(new_drafts)
            if sources is not None and new_sources is not None:
                sources.copy_(new_sources)

        def accept(tokens: torch.Tensor) -> None:
            accepted = self._history.accept(staged, drafts, tokens)
            torch.cat((tokens, accepted) if sources is None else (tokens, accepted, sources), out=packed)

        def sample_greedy() -> None:
            accept(argmax(self._logits))

        def sample_drawn() -> None:
            parameters = {name: staged[name] for name, _ in PARAMETERS}
            parameters["steps"] = parameters["steps"] + self._inputs.tensors["positions"]  # see `SamplingPlan`
            accept(draw(self._logits, parameters))

        before = capture(device, place, place, pool)
        greedy = capture(device, sample_greedy, sample_greedy, before.pool())
        drawn = capture(device, sample_drawn, sample_drawn, greedy.pool())
        result = VerifyResult(packed[:rows], packed[rows : rows + size], packed, persistent=True)
        self._graphs = _Graphs(before, greedy, drawn, drafts, sources, result)
        return drawn.pool()

    def replay(self) -> None:
        """Replay both parts once with greedy sampling, if captured, to measure their time."""
        if self._graphs is not None:
            self._graphs.before.replay()
            self._graphs.greedy.replay()

    def _place(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._history.place(self._inputs.staged, self._inputs.tensors, self._bucket)


@dataclass(frozen=True)
class _Graphs:
    """The captured graphs and their outputs."""

    before: Any
    greedy: Any
    drawn: Any
    drafts: torch.Tensor
    sources: torch.Tensor | None
    result: VerifyResult
