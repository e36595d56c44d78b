"""The tokens of the sequences that run, kept on the device: their drafts, and where a step with drafts stands."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ...ops.speculate.accept_drafts import accept_drafts
from ...ops.speculate.draft_ngram import draft_ngram
from ...ops.speculate.place_drafts import place_drafts
from ..steps.plan import StepPlan
from .staging import Staging

Draft = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
Accept = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
_PLACED = ("input_ids", "positions", "slot_mapping", "context_lens")


def histories_bytes(max_num_seqs: int, max_model_len: int) -> int:
    """Device memory of the histories."""
    return 4 * max_num_seqs * (max_model_len + 1)


class Histories:
    """A row of tokens for each sequence that may run at once.

    A step goes `place`, the program, sampling, `accept`. `draft` makes the drafts, as `draft_ngram` does, and
    `hold` counts those that hold, as `accept_drafts` does.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.device = device
        self.draft: Draft = draft_ngram
        self.hold: Accept = accept_drafts
        self._tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self._lengths = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        sizes = {"rows": max_num_seqs, "counts": max_num_seqs, "first": max_num_seqs, "query_start": max_num_seqs + 1}
        self._staging = Staging([(name, (size,), torch.int32) for name, size in sizes.items()], device)
        self._drafts = self._tokens.new_empty(0, 0)

    def place(self, plan: StepPlan, inputs: Mapping[str, torch.Tensor]) -> None:
        """Begin the histories that the plan tells, and fill in the step's `inputs` where only the device can."""
        self._tell(plan)
        host, count = self._staging.host, plan.num_sequences
        host["rows"][:count], host["counts"][:count] = plan.follow_rows, plan.drafts
        host["first"][:count] = plan.first_logits
        # not the program's own: one without drafts whose attention takes one row a sequence has no such input
        host["query_start"][: count + 1] = plan.query_start
        self._staging.upload()
        rows, counts, _ = self._of_step(count)
        most = max(0, int(plan.drafts.max()))
        self._drafts = self.draft(self._tokens, self._lengths, rows, most) if most else rows.new_empty(count, 0)
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

    def accept(self, plan: StepPlan, tokens: torch.Tensor) -> torch.Tensor:
        """Take in what the step sampled [N]; returns how many drafts hold [B], int32."""
        rows, counts, first = self._of_step(plan.num_sequences)
        return self.hold(tokens, self._drafts, rows, counts, first, self._tokens, self._lengths)

    def _of_step(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = self._staging.device
        return device["rows"][:count], device["counts"][:count], device["first"][:count]

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
