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
from ..steps.plan import FORMER_ANSWERS, OWN_TOKENS, RINGS, TRAINED_DRAFT, StepMasks, StepPlan
from .staging import Staging
from .trained_draft import STAGED, First, TrainedDraft

Draft = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
Accept = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
SURE = 4
"""With a trained draft, so many tokens must agree for its drafts to be left aside: what follows there is then more
likely.
"""
_PLACED = ("input_ids", "positions", "slot_mapping", "context_lens")
_OF_STEP = ("rows", "counts", "first", "rings", "ring_ends", "ring_filled")


def histories_bytes(max_num_seqs: int, max_model_len: int, ring_tokens: int) -> int:
    """Device memory of the histories and rings."""
    return 4 * (max_num_seqs * (max_model_len + 1) + RINGS * ring_tokens)


class Histories:
    """A row of tokens for each sequence that may run at once, and RINGS rings of `ring_tokens` tokens of former answers
    (see `scheduling/rings.py`, which knows whose they are).

    A step goes `place`, the program, sampling, `accept`. `draft` makes the drafts, as `draft_ngram` does, and
    `hold` counts those that hold, as `accept_drafts` does. `trained` drafts where neither a sequence's own tokens nor
    its ring agree with SURE tokens of its end. `sources` [B]: where the step's drafts came from, as `StepResult` has
    it; None where own tokens were all that there was.
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
        self.draft: Draft = draft_ngram
        self.hold: Accept = accept_drafts
        self.sources: torch.Tensor | None = None
        self._tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self._lengths = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._left = Staging([("counts", (max_num_seqs,), torch.int32)], device)
        self._rings = torch.zeros(RINGS, ring_tokens, dtype=torch.int32, device=device)
        sizes = {**dict.fromkeys(_OF_STEP, max_num_seqs), "query_start": max_num_seqs + 1}
        fields = [(name, (size,), torch.int32) for name, size in sizes.items()]
        if trained is not None:
            longs = ("state_rows", "last_rows")
            fields += [(name, (max_num_seqs,), torch.int64 if name in longs else torch.int32) for name in STAGED]
        self._staging = Staging(fields, device)
        if trained is not None:
            trained.use({name: self._staging.device[name] for name in STAGED}, self._lengths)
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
        if self.trained is not None:
            self.trained.stage(host, plan)
        self._staging.upload()
        rows, counts, _, *rings = self._of_step(count)
        most = max(0, int(plan.drafts.max()))
        self._drafts, self.sources = rows.new_empty(count, 0), None
        if most:
            self._drafts, self.sources = self._make_drafts(plan, rows, rings, most, inputs["block_table"])
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

    def _make_drafts(
        self, plan: StepPlan, rows: torch.Tensor, rings: list[torch.Tensor], most: int, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [B, most] and their sources."""
        drafts, agreed = self.draft(self._tokens, self._lengths, rows, most)
        sources = None
        if self.trained is not None:
            agreed = agreed.clamp_min(SURE - 1)  # a ring that agrees with less is not asked
        if plan.ring_filled.any():
            sources = draft_recalled(self._tokens, self._lengths, rows, agreed, self._rings, *rings, drafts)
        if self.trained is None:
            return drafts, sources
        unsure = agreed < SURE
        if sources is None:
            sources = torch.full_like(agreed, OWN_TOKENS)
        else:
            unsure &= sources != FORMER_ANSWERS
        chained = self.trained.chain(plan, block_table, most)
        return torch.where(unsure[:, None], chained, drafts), sources.masked_fill_(unsure, TRAINED_DRAFT)

    def follow(
        self, first: First | None, plan: StepPlan, input_ids: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        """Let the trained draft read a step whose tokens [N] were sampled; `first`: of the program that ran."""
        if self.trained is not None and first is not None:
            query_start = self._staging.device["query_start"]
            self.trained.follow(first, plan, input_ids, tokens, accepted, query_start)

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
