"""The tokens of the sequences that run, kept on the device: where a step with drafts stands. Their drafts come from
these, and from former answers, which are kept here too.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ...ops.speculate.accept_drafts import accept_drafts
from ...ops.speculate.draft_ngram import draft_ngram
from ...ops.speculate.draft_recalled import draft_recalled
from ...ops.speculate.keep_answers import keep_answers
from ...ops.speculate.place_drafts import place_drafts
from ..steps.plan import RINGS, StepMasks, StepPlan
from .staging import Staging

Draft = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
Accept = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
_PLACED = ("input_ids", "positions", "slot_mapping", "context_lens")
_OF_STEP = ("rows", "counts", "first", "rings", "ring_ends", "ring_filled")


def histories_bytes(max_num_seqs: int, max_model_len: int, ring_tokens: int) -> int:
    """Device memory of the histories and rings."""
    return 4 * (max_num_seqs * (max_model_len + 1) + RINGS * ring_tokens)


class Histories:
    """A row of tokens for each sequence that may run at once, and RINGS rings of `ring_tokens` tokens of former answers
    (see `scheduling/rings.py`, which knows whose they are).

    A step goes `place`, the program, sampling, `accept`. `draft` makes the drafts, as `draft_ngram` does, and
    `hold` counts those that hold, as `accept_drafts` does. `recalled` [B]: 1 where a ring knew better in the step, 0
    elsewhere; None where no ring was looked at.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device, ring_tokens: int = 0) -> None:
        self.device = device
        self.draft: Draft = draft_ngram
        self.hold: Accept = accept_drafts
        self.recalled: torch.Tensor | None = None
        self._tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self._lengths = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._left = Staging([("counts", (max_num_seqs,), torch.int32)], device)
        self._rings = torch.zeros(RINGS, ring_tokens, dtype=torch.int32, device=device)
        sizes = {**dict.fromkeys(_OF_STEP, max_num_seqs), "query_start": max_num_seqs + 1}
        self._staging = Staging([(name, (size,), torch.int32) for name, size in sizes.items()], device)
        self._drafts = self._tokens.new_empty(0, 0)

    @property
    def drafts(self) -> torch.Tensor:
        """What the last step that was placed has for drafts: [B, K] int32, on the device."""
        return self._drafts

    def place(self, plan: StepPlan, inputs: Mapping[str, torch.Tensor]) -> None:
        """Keep answers that ended, begin the histories that the plan tells, and fill in the step's `inputs` where only
        the device can.
        """
        if len(plan.kept):
            keep_answers(self._tokens, self._upload(plan.kept), self._rings)  # before their rows are told of others
        self._tell(plan)
        host, count = self._staging.host, plan.num_sequences
        of_step = plan.follow_rows, plan.drafts, plan.first_logits, plan.rings, plan.ring_ends, plan.ring_filled
        for name, values in zip(_OF_STEP, of_step, strict=True):
            host[name][:count] = values
        # not the program's own: one without drafts whose attention takes one row a sequence has no such input
        host["query_start"][: count + 1] = plan.query_start
        self._staging.upload()
        rows, counts, _, *rings = self._of_step(count)
        most = max(0, int(plan.drafts.max()))
        self._drafts, self.recalled = rows.new_empty(count, 0), None
        if most:
            self._drafts, agreed = self.draft(self._tokens, self._lengths, rows, most)
            if plan.ring_filled.any():
                self.recalled = draft_recalled(
                    self._tokens, self._lengths, rows, agreed, self._rings, *rings, self._drafts
                )
        if (plan.drafts >= 0).any():
            place_drafts(
                self._tokens,
                self._lengths,
                self._drafts,
                rows,
                counts,
                self._staging.device["query_start"][: count + 1],
                inputs["block_table"],
                *(inputs[name] for name in _PLACED),
            )

    def accept(self, plan: StepPlan, tokens: torch.Tensor, masks: StepMasks | None = None) -> torch.Tensor:
        """Take in what the step sampled [N]; returns how many drafts hold [B], int32. Of a constrained sequence no more
        of them hold than there are `masks` after them.
        """
        rows, counts, first, *_ = self._of_step(plan.num_sequences)
        if masks is not None and plan.masks_drafts:
            self._left.host["counts"][: plan.num_sequences] = masks.drafts_left(plan)
            self._left.upload()
            counts = self._left.device["counts"][: plan.num_sequences]
        return self.hold(tokens, self._drafts, rows, counts, first, self._tokens, self._lengths)

    def _of_step(self, count: int) -> list[torch.Tensor]:
        return [self._staging.device[name][:count] for name in _OF_STEP]

    def _tell(self, plan: StepPlan) -> None:
        if not len(plan.told_rows):
            return
        starts = np.cumsum(plan.told_lengths) - plan.told_lengths
        begins = plan.told_rows.astype(np.int64) * self._tokens.shape[1] - starts
        places = np.repeat(begins, plan.told_lengths) + np.arange(len(plan.told_tokens))
        self._tokens.view(-1).index_copy_(0, self._upload(places), self._upload(plan.told_tokens))
        rows = self._upload(plan.told_rows.astype(np.int64))
        self._lengths.index_copy_(0, rows, self._upload(plan.told_lengths))

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        """Once a request, so from memory that is pinned for it: the steps before are not waited for."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
