"""Drafts of a chosen acceptance for `bench latency --speculate`: what speed comes to at that rate, not which rate a
model has. They are a recorded continuation of the very prompts, of which each token is corrupted with probability
1 - p.
"""

from collections.abc import Sequence
from typing import Any

import torch

KEY_TOKENS = 16
"""So many tokens of its prompt tell a sequence, or all of a shorter one."""


class InjectedDrafts:
    """In place of `draft_ngram`: the tokens that follow in `recorded` (a prompt with its continuation each), on the
    device. `key`: the first tokens that tell one from another.

    A step that samples another token than the one that was recorded (two were nearly as likely) leaves the recording:
    no draft is right from there on, and fewer are accepted than asked for.
    """

    def __init__(
        self, recorded: Sequence[Sequence[int]], acceptance: float, vocabulary: int, key: int, device: torch.device
    ) -> None:
        width = max(map(len, recorded))
        rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in recorded]
        self._recorded = torch.tensor(rows, dtype=torch.int32, device=device)
        self._acceptance, self._vocabulary, self._key = acceptance, vocabulary, key

    def __call__(self, history: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """See `draft_ngram`."""
        recorded, mine = self._recorded, rows.clamp_min(0).long()
        same = history[mine, None, : self._key] == recorded[None, :, : self._key]
        which = same.all(-1).int().argmax(1, keepdim=True)
        places = lengths[mine].long()[:, None] + torch.arange(count, device=rows.device)
        tokens = recorded[which, places.clamp_max(recorded.shape[1] - 1)]
        # a word for each sequence and place, the same at every run
        word = ((which * 0x1F123BB5 + places + 1) * 0x9E3779B1) & 0xFFFFFFFF
        word = ((word ^ (word >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
        right = (word ^ (word >> 13)) < self._acceptance * 2.0**32
        return torch.where(right, tokens, (tokens + 1) % self._vocabulary)


def inject(
    llm: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Any], acceptance: float, vocabulary: int
) -> None:
    """Let `llm` draft from these outputs of the prompts."""
    recorded = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    key = min(KEY_TOKENS, *map(len, prompts))
    llm.engine.runner.histories.draft = InjectedDrafts(recorded, acceptance, vocabulary, key, llm.device)
