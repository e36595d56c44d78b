"""The tokens of the sequences that run, kept on the device: where a step with drafts stands. Their drafts come from
these, and from former answers, which are kept here too.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ...compiler.program.program import Bucket
from ...ops.spec_decode.accept_drafts import accept_drafts
from ...ops.spec_decode.draft_ngram import draft_ngram
from ...ops.spec_decode.draft_recalled import draft_recalled
from ...ops.spec_decode.keep_answers import keep_answers
from ...ops.spec_decode.place_drafts import place_drafts
from ..scheduler.step_plan import FORMER_ANSWERS, OWN_TOKENS, RINGS, TRAINED_DRAFT, Int32, StepMasks, StepPlan
from .inputs.staging import Staging
from .inputs.step_inputs import Beyond
from .trained_draft import TrainedDraft

Draft = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
Accept = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
SURE = 4
"""With a trained draft, so many tokens must agree for its drafts to be left aside: what follows there is then more
likely.
"""
_PLACED = ("input_ids", "positions", "slot_mapping", "context_lens")
_OF_STEP = (
    Beyond("rows", torch.int32, -1),
    Beyond("counts", torch.int32, -1),
    Beyond("first", torch.int32, 0),
    Beyond("rings", torch.int32, -1),
    Beyond("ring_ends", torch.int32, 0),
    Beyond("ring_filled", torch.int32, 0),
)


def histories_bytes(max_num_seqs: int, max_model_len: int, ring_tokens: int) -> int:
    """Device memory of the histories and rings."""
    return 4 * (max_num_seqs * (max_model_len + 1) + RINGS * ring_tokens)


class Histories:
    """A row of tokens for each sequence that may run at once, and RINGS rings of `ring_tokens` tokens of former answers
    (see `scheduler/answer_history.py`, which knows whose they are).

    A step goes `begin`, `values` (which cross with its inputs), `place`, the program, sampling, `accept`. `draft` makes
    the drafts, as `draft_ngram` does, and `hold` counts those that hold, as `accept_drafts` does. `trained` drafts
    where neither a sequence's own tokens nor its ring agree with SURE tokens of its end. `fields`: the arrays of
    `values`.
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
        self.fields: tuple[Beyond, ...] = _OF_STEP if trained is None else (*_OF_STEP, *trained.fields)
        self._tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self._lengths = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._left = Staging([("counts", (max_num_seqs,), torch.int32)], device)
        self._rings = torch.zeros(RINGS, ring_tokens, dtype=torch.int32, device=device)

    @property
    def as_made(self) -> bool:
        """Whether drafts are made and counted by the ops that a CUDA graph would have."""
        return self.draft is draft_ngram and self.hold is accept_drafts

    @property
    def tells_sources(self) -> bool:
        """Whether drafts may come from elsewhere than a sequence's own tokens."""
        return self.trained is not None or bool(self._rings.numel())

    def begin(self, plan: StepPlan) -> None:
        """Keep answers that ended, and begin the histories that the plan tells."""
        if len(plan.kept):
            keep_answers(self._tokens, self._upload(plan.kept), self._rings)  # before their rows are told of others
        self._tell(plan)

    def warm_up(self) -> None:
        """Launch the kernels that no program's capture launches. What they write means nothing."""
        if self._rings.numel():
            keep_answers(self._tokens, self._upload(np.zeros((1, 5), np.int32)), self._rings)

    def values(self, plan: StepPlan) -> dict[str, Int32]:
        """What the arrays of `fields` hold for a step."""
        values = {
            "rows": plan.follow_rows,
            "counts": plan.drafts,
            "first": plan.first_logits,
            "rings": plan.rings,
            "ring_ends": plan.ring_ends,
            "ring_filled": plan.ring_filled,
        }
        return values if self.trained is None else values | self.trained.values(plan)

    def place(
        self, staged: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], bucket: Bucket
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fill in a step's `inputs` where only the device can. `staged`: the arrays of `fields`, and query_start.

        Returns drafts [S, K] int32 of the bucket's S sequences, of each as many as its program has rows for, and where
        they came from [S], as `StepResult` has it; None where own tokens were all that there was.
        """
        rows = staged["rows"]
        drafts, sources = rows.new_empty(len(rows), 0), None
        if bucket.verifies:
            drafts, sources = self._make_drafts(staged, inputs["block_table"], bucket)
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

    def _make_drafts(
        self, staged: Mapping[str, torch.Tensor], block_table: torch.Tensor, bucket: Bucket
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, most = staged["rows"], bucket.rows - 1
        drafts, agreed = self.draft(self._tokens, self._lengths, rows, most)
        sources = None
        if self.trained is not None:
            agreed = agreed.clamp_min(SURE - 1)  # a ring that agrees with less is not asked
        if self._rings.numel():
            rings = [staged[name] for name in ("rings", "ring_ends", "ring_filled")]
            sources = draft_recalled(self._tokens, self._lengths, rows, agreed, self._rings, *rings, drafts)
        if self.trained is None:
            return drafts, sources
        unsure = agreed < SURE
        if sources is None:
            sources = torch.full_like(agreed, OWN_TOKENS)
        else:
            unsure &= sources != FORMER_ANSWERS
        chained = self.trained.chain(staged, self._lengths, block_table, bucket)
        return torch.where(unsure[:, None], chained, drafts), sources.masked_fill_(unsure, TRAINED_DRAFT)

    def accept(
        self,
        staged: Mapping[str, torch.Tensor],
        drafts: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take in what a step sampled [N]; returns how many drafts hold [S], int32. `counts` [B]: how many may hold of
        each of the first B sequences, which are all that there are then; None: as many as it computes.
        """
        if counts is None:
            return self.hold(
                tokens, drafts, staged["rows"], staged["counts"], staged["first"], self._tokens, self._lengths
            )
        count = len(counts)
        rows, first = staged["rows"][:count], staged["first"][:count]
        return self.hold(tokens, drafts[:count], rows, counts, first, self._tokens, self._lengths)

    def left(self, plan: StepPlan, masks: StepMasks) -> torch.Tensor:
        """How many drafts of each sequence may hold [B]: of a constrained one no more than there are masks after
        them.
        """
        self._left.host["counts"][: plan.num_sequences] = masks.drafts_left(plan)
        self._left.upload()
        return self._left.device["counts"][: plan.num_sequences]

    def _tell(self, plan: StepPlan) -> None:
        if not len(plan.told_rows):
            return
        starts = np.cumsum(plan.told_lengths) - plan.told_lengths
        begins = plan.told_rows.astype(np.int64) * self._tokens.shape[1] - starts
        places = np.repeat(begins, plan.told_lengths) + np.arange(len(plan.told_tokens))
        count = len(places)
        where = self._upload(np.concatenate((places, plan.told_rows.astype(np.int64))))
        what = self._upload(np.concatenate((plan.told_tokens, plan.told_lengths)))
        self._tokens.view(-1).index_copy_(0, where[:count], what[:count])
        self._lengths.index_copy_(0, where[count:], what[count:])

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        """Once a request, so from memory that is pinned for it: the steps before are not waited for."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
