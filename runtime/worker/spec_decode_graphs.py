"""What surrounds the program of a step whose sequences are followed: its drafts are placed before the program, and what
it samples is counted after it. As CUDA graphs where the program is one: launched one by one, a few small kernels keep
the host longer than they keep the device.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...compiler.program.program import Bucket
from ...compiler.run.captured import capture
from ...ops.elementwise.argmax import argmax
from ..scheduler.step_plan import Int32, StepMasks, StepPlan
from .answer_history import Histories
from .inputs.step_inputs import Beyond, StepInputs
from .sampler import NUMBERS, drawn_with


@dataclass(frozen=True)
class Counted:
    """What a step has sampled and how many drafts hold, int32 on the device; tokens [N], accepted [S] and sources [S],
    where there are any, lie one after another in `whole`, so that they go to the host as one.

    lasting  they are the same memory at each such step, so nothing may write them before they have been copied
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    whole: torch.Tensor
    lasting: bool = False

    def on_host(self, whole: Int32, plan: StepPlan) -> tuple[Int32, Int32, Int32 | None]:
        """Tokens, accepted and sources of the plan's sequences, of a copy of `whole`."""
        rows, count = len(self.tokens), plan.num_sequences
        after = whole[rows:].reshape(-1, len(self.accepted))
        return whole[: len(plan.sampling.temperature)], after[0, :count], after[1, :count] if len(after) > 1 else None


def arrays(histories: Histories) -> tuple[Beyond, ...]:
    """What crosses to the device with a step's inputs, besides: for its histories, and for sampling."""
    return (*histories.fields, *(Beyond(name, dtype, 0, of_rows=True) for name, dtype in NUMBERS))


class Surroundings:
    """Those of one program: `inputs` are the program's, with room for `arrays`; `logits` what it returns.

    A step goes `values`, which cross with its inputs, `place`, the program, and then `sample`, where it is `captured`
    and nothing is asked but tokens of the logits as they are, or `take`.
    `drafts` [S, K] int32: what `place` has found for the bucket's sequences. `sent`: the event after which the last
    step's `Counted` has been copied; the code that copies it leaves the event here.
    """

    def __init__(self, histories: Histories, bucket: Bucket, inputs: StepInputs, logits: torch.Tensor) -> None:
        self._histories, self._bucket, self._inputs, self._logits = histories, bucket, inputs, logits
        self.drafts = inputs.staged["rows"].new_empty(bucket.sequences, 0)
        self.captured = False
        self.sent: Any = None
        self._sources: torch.Tensor | None = None
        self._recorded: _Recorded | None = None

    def values(self, plan: StepPlan) -> dict[str, Any]:
        """What `arrays` hold for a step."""
        values: dict[str, Any] = dict(self._histories.values(plan))
        if self._recorded is not None and not plan.sampling.greedy:
            values |= {name: getattr(plan.sampling, name) for name, _ in NUMBERS}
        return values

    def place(self, plan: StepPlan) -> None:
        """Fill in the inputs of this step, which was staged, and find its drafts."""
        recorded = self._recorded
        self.captured = recorded is not None and self._histories.as_made
        if recorded is not None and self.captured:
            recorded.before.replay()
            self.drafts, self._sources = recorded.drafts, recorded.sources
        elif (plan.drafts >= 0).any():
            self.drafts, self._sources = self._place()
        else:  # all is known
            self.drafts, self._sources = self.drafts[:, :0], None

    def sample(self, plan: StepPlan) -> Counted:
        """The tokens of all rows, taken in. To be called where `captured` only."""
        if self._recorded is None:
            raise RuntimeError("what a step samples was not captured; call `take` with it")
        if self.sent is not None:
            torch.cuda.current_stream(self._logits.device).wait_event(self.sent)
        (self._recorded.greedy if plan.sampling.greedy else self._recorded.drawn).replay()
        return self._recorded.counted

    def take(self, tokens: torch.Tensor, plan: StepPlan, masks: StepMasks | None = None) -> Counted:
        """Take in the step's tokens [N]. Of a constrained sequence no more drafts hold than there are `masks` after
        them.
        """
        left = None if masks is None or not plan.masks_drafts else self._histories.left(plan, masks)
        accepted = self._histories.accept(self._inputs.staged, self.drafts, tokens, left)
        sources = () if self._sources is None else (self._sources[: len(accepted)],)
        return Counted(tokens, accepted, torch.cat((tokens, accepted, *sources)))

    def capture(self, pool: Any) -> Any:
        """GPU only: record both sides as CUDA graphs; returns the pool of their memory. Without a step in the inputs
        (see `StepInputs.clear`), so that nothing is stored.
        """
        staged = self._inputs.staged
        device, size, rows = self._logits.device, self._bucket.sequences, len(self._logits)
        # outside the pool: what a graph leaves there any other one may overwrite
        drafts = torch.zeros(size, self._bucket.rows - 1, dtype=torch.int32, device=device)
        sources = torch.zeros(size, dtype=torch.int32, device=device) if self._histories.tells_sources else None
        whole = torch.zeros(rows + size * (1 if sources is None else 2), dtype=torch.int32, device=device)

        def place() -> None:
            found, from_where = self._place()
            drafts.copy_(found)
            if sources is not None and from_where is not None:
                sources.copy_(from_where)

        def take(tokens: torch.Tensor) -> None:
            accepted = self._histories.accept(staged, drafts, tokens)
            torch.cat((tokens, accepted) if sources is None else (tokens, accepted, sources), out=whole)

        def likeliest() -> None:
            take(argmax(self._logits))

        def draw() -> None:
            numbers = {name: staged[name] for name, _ in NUMBERS}
            numbers["steps"] = numbers["steps"] + self._inputs.tensors["positions"]  # see `SamplingPlan`
            take(drawn_with(self._logits, numbers))

        before = capture(device, place, place, pool)
        greedy = capture(device, likeliest, likeliest, before.pool())
        drawn = capture(device, draw, draw, greedy.pool())
        counted = Counted(whole[:rows], whole[rows : rows + size], whole, lasting=True)
        self._recorded = _Recorded(before, greedy, drawn, drafts, sources, counted)
        return drawn.pool()

    def replay(self) -> None:
        """Both sides once, of greedy rows, where there are any, as `time_programs` times them."""
        if self._recorded is not None:
            self._recorded.before.replay()
            self._recorded.greedy.replay()

    def _place(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._histories.place(self._inputs.staged, self._inputs.tensors, self._bucket)


@dataclass(frozen=True)
class _Recorded:
    """The graphs of both sides, and where they leave what they find."""

    before: Any
    greedy: Any
    drawn: Any
    drafts: torch.Tensor
    sources: torch.Tensor | None
    counted: Counted
