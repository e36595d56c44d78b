"""Drafts with a given acceptance rate for `bench latency --speculate`.

Drafts are a recorded continuation of the prompts, with each token replaced by a wrong one with probability 1 - p.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...ops.spec_decode.accept_drafts import accept_drafts
from ...ops.spec_decode.draft_ngram import LONGEST, draft_ngram

KEY_TOKENS = 16
"""Number of first tokens that identify a recording."""


class InjectedDrafts:
    """Replaces `draft_ngram` and `accept_drafts`: drafts come from `recorded`, prompts with their continuations.

    With random weights many tokens are nearly as likely as the best one. A step of another size may then choose another
    token, and all later drafts would be wrong. Each sampled token is therefore replaced by the recorded one, with a
    dozen small kernels that real steps do not have. `key`: number of first tokens that identify a recording.
    """

    def __init__(
        self, recorded: Sequence[Sequence[int]], acceptance: float, vocabulary: int, key: int, device: torch.device
    ) -> None:
        width = max(map(len, recorded))
        rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in recorded]
        self._recorded = torch.tensor(rows, dtype=torch.int32, device=device)
        self._acceptance, self._vocabulary, self._key = acceptance, vocabulary, key

    def draft(
        self, history: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `draft_ngram`; the counts are equal for all drafts, so that earlier answers are not preferred."""
        which, places, tokens = self._following(history, lengths, rows, count)
        # one random word for each sequence and position, the same in every run
        word = ((which * 0x1F123BB5 + places + 1) * 0x9E3779B1) & 0xFFFFFFFF
        word = ((word ^ (word >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
        right = (word ^ (word >> 13)) < self._acceptance * 2.0**32
        return torch.where(right, tokens, (tokens + 1) % self._vocabulary), torch.full_like(rows, LONGEST)

    def hold(
        self,
        tokens: torch.Tensor,
        drafts: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        first: torch.Tensor,
        history: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """See `accept_drafts`; `tokens` are replaced by the recorded ones."""
        most = drafts.shape[1] + 1
        _, _, recorded = self._following(history, lengths, rows, most)
        offsets = torch.arange(most, device=rows.device)
        mine = (rows >= 0)[:, None] & (offsets <= counts.clamp_min(0)[:, None])
        spare = len(tokens)  # one more column for padding rows
        sampled = torch.cat([tokens, tokens.new_zeros(1)])
        places = torch.where(mine, first.long()[:, None] + offsets, spare)
        # -1: a step before the end of its prompt samples no token
        sampled.scatter_(0, places.view(-1), torch.where(sampled[places] < 0, -1, recorded).view(-1))
        tokens.copy_(sampled[:spare])
        return accept_drafts(tokens, drafts, rows, counts, first, history, lengths)

    def _following(
        self, history: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ([B, 1] recording of each row, [B, count] positions in it, [B, count] int32 tokens there)."""
        recorded, mine = self._recorded, rows.clamp_min(0).long()
        same = history[mine, None, : self._key] == recorded[None, :, : self._key]
        which = same.all(-1).int().argmax(1, keepdim=True)
        places = lengths[mine].long()[:, None] + torch.arange(count, device=rows.device)
        return which, places, recorded[which, places.clamp_max(recorded.shape[1] - 1)]


def inject(
    llm: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Any], acceptance: float, vocabulary: int
) -> None:
    """Let `llm` draft from these outputs of the prompts, and answer with them."""
    recorded = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    key = min(KEY_TOKENS, *map(len, prompts))
    injected = InjectedDrafts(recorded, acceptance, vocabulary, key, llm.device)
    history = llm.engine.runner.token_history
    history.draft_op, history.accept_op = injected.draft, injected.hold


def stop_injecting(llm: Any) -> None:
    """Restore drafting and sampling of `llm`."""
    history = llm.engine.runner.token_history
    history.draft_op, history.accept_op = draft_ngram, accept_drafts
