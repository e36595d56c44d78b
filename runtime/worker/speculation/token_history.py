"""Token history of the running sequences on the device, for speculative decoding.

N-gram drafts are found in a sequence's own tokens, and in former answers, which are kept in ring buffers.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ....compiler.program.program import Bucket
from ....ops.spec_decode.accept_drafts import accept_drafts
from ....ops.spec_decode.draft_from_answers import draft_recalled
from ....ops.spec_decode.draft_ngram import draft_ngram
from ....ops.spec_decode.place_drafts import place_drafts
from ....ops.spec_decode.store_answers import keep_answers
from ...scheduler.step_plan import FORMER_ANSWERS, OWN_TOKENS, RINGS, TRAINED_DRAFT, Int32, StepMasks, StepPlan
from ..staging import Staging
from ..step_inputs import ExtraInput
from .trained_draft import TrainedDraft

DraftOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
AcceptOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
MIN_MATCH = 4
"""With a trained draft, n-gram drafts are used only if this many tokens match, since they are then accepted more often.
"""
_PLACED = ("input_ids", "positions", "slot_mapping", "context_lens")
_EXTRA_INPUTS = (
    ExtraInput("rows", torch.int32, -1),
    ExtraInput("counts", torch.int32, -1),
    ExtraInput("first", torch.int32, 0),
    ExtraInput("rings", torch.int32, -1),
    ExtraInput("ring_ends", torch.int32, 0),
    ExtraInput("ring_filled", torch.int32, 0),
)


class TokenHistory:
    """One row of tokens per running sequence, and RINGS ring buffers of `ring_tokens` tokens of former answers.

    `scheduler/answer_history.py` assigns the rings. A step calls `start_step`, `input_values`, `place`, the program,
    sampling, and `accept`, in this order.

    trained       trained draft, used if neither the own tokens nor the ring match MIN_MATCH tokens
    draft_op      makes the n-gram drafts, like `draft_ngram`
    accept_op     counts the accepted drafts, like `accept_drafts`
    extra_inputs  the arrays of `input_values`
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        ring_tokens: int = 0,
        trained: TrainedDraft | None = None,
    ) -> None:
        self.device = device
        self.trained = trained
        self.draft_op: DraftOp = draft_ngram
        self.accept_op: AcceptOp = accept_drafts
        self.extra_inputs = _EXTRA_INPUTS if trained is None else (*_EXTRA_INPUTS, *trained.extra_inputs)
        self._tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self._lengths = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._limits = Staging([("counts", (max_num_seqs,), torch.int32)], device)
        self._rings = torch.zeros(RINGS, ring_tokens, dtype=torch.int32, device=device)

    @property
    def uses_default_ops(self) -> bool:
        """Whether drafts are made and accepted by the ops that CUDA graphs capture."""
        return self.draft_op is draft_ngram and self.accept_op is accept_drafts

    @property
    def has_sources(self) -> bool:
        """Whether drafts may have other sources than a sequence's own tokens."""
        return self.trained is not None or bool(self._rings.numel())

    def start_step(self, plan: StepPlan) -> None:
        """Keep the answers of finished sequences in their rings, then write the rows of new sequences."""
        if len(plan.kept):
            keep_answers(self._tokens, self._upload(plan.kept), self._rings)  # before their rows are reused
        self._write_rows(plan)

    def warm_up(self) -> None:
        """Launch the kernels that no captured program launches; the result is undefined."""
        if self._rings.numel():
            keep_answers(self._tokens, self._upload(np.zeros((1, 5), np.int32)), self._rings)

    def input_values(self, plan: StepPlan) -> dict[str, Int32]:
        """Return the values of `extra_inputs` for a step."""
        values = {
            "rows": plan.follow_rows,
            "counts": plan.drafts,
            "first": plan.first_logits,
            "rings": plan.rings,
            "ring_ends": plan.ring_ends,
            "ring_filled": plan.ring_filled,
        }
        return values if self.trained is None else values | self.trained.input_values(plan)

    def place(
        self, staged: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], bucket: Bucket
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft, and fill in those of a step's `inputs` that depend on the drafts. `staged`: `extra_inputs` and
        query_start on the device.

        Returns drafts [S, K] int32 for the bucket's S sequences and K drafts per sequence, and their sources [S] as in
        `StepResult`, or None if all are own tokens.
        """
        rows = staged["rows"]
        drafts, sources = rows.new_empty(len(rows), 0), None
        if bucket.verifies:
            drafts, sources = self._draft(staged, inputs["block_table"], bucket)
        place_drafts(
            self._tokens,
            self._lengths,
            drafts,
            rows,
            staged["counts"],
            staged["query_start"],
            inputs["block_table"],
            *(inputs[name] for name in _PLACED),
        )
        return drafts, sources

    def _draft(
        self, staged: Mapping[str, torch.Tensor], block_table: torch.Tensor, bucket: Bucket
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, num_drafts = staged["rows"], bucket.rows - 1
        drafts, matched = self.draft_op(self._tokens, self._lengths, rows, num_drafts)
        sources = None
        if self.trained is not None:
            matched = matched.clamp_min(MIN_MATCH - 1)  # a ring must match MIN_MATCH tokens too
        if self._rings.numel():
            rings = [staged[name] for name in ("rings", "ring_ends", "ring_filled")]
            sources = draft_recalled(self._tokens, self._lengths, rows, matched, self._rings, *rings, drafts)
        if self.trained is None:
            return drafts, sources
        unmatched = matched < MIN_MATCH
        if sources is None:
            sources = torch.full_like(matched, OWN_TOKENS)
        else:
            unmatched &= sources != FORMER_ANSWERS
        trained = self.trained.draft(staged, self._lengths, block_table, bucket)
        return torch.where(unmatched[:, None], trained, drafts), sources.masked_fill_(unmatched, TRAINED_DRAFT)

    def accept(
        self,
        staged: Mapping[str, torch.Tensor],
        drafts: torch.Tensor,
        tokens: torch.Tensor,
        limits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append a step's sampled tokens [N] to the history; return the numbers of accepted drafts [S], int32.

        `limits` [B]: maxima for the first B sequences, which are then the only ones; None: all drafts.
        """
        if limits is None:
            return self.accept_op(
                tokens, drafts, staged["rows"], staged["counts"], staged["first"], self._tokens, self._lengths
            )
        count = len(limits)
        rows, first = staged["rows"][:count], staged["first"][:count]
        return self.accept_op(tokens, drafts[:count], rows, limits, first, self._tokens, self._lengths)

    def draft_limits(self, plan: StepPlan, masks: StepMasks) -> torch.Tensor:
        """Return the maximum of accepted drafts [B]: a constrained sequence needs a mask after each of them."""
        self._limits.host["counts"][: plan.num_sequences] = masks.drafts_left(plan)
        self._limits.upload()
        return self._limits.device["counts"][: plan.num_sequences]

    def _write_rows(self, plan: StepPlan) -> None:
        if not len(plan.start_rows):
            return
        starts = np.cumsum(plan.start_lengths) - plan.start_lengths
        offsets = plan.start_rows.astype(np.int64) * self._tokens.shape[1] - starts
        places = np.repeat(offsets, plan.start_lengths) + np.arange(len(plan.start_tokens))
        count = len(places)
        indices = self._upload(np.concatenate((places, plan.start_rows.astype(np.int64))))
        values = self._upload(np.concatenate((plan.start_tokens, plan.start_lengths)))
        self._tokens.view(-1).index_copy_(0, indices[:count], values[:count])
        self._lengths.index_copy_(0, indices[count:], values[count:])

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        """Copy once-per-request values from memory pinned for them, without waiting for earlier steps."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
