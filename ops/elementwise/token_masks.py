"""Packed masks of allowed tokens, one bit per token, for `argmax` and `sample`.

`masks` [M, W] int32 has 32 tokens per word, lowest bit first; `mask_rows` [B] int32 is the index of the mask of each
row of logits (-1: all tokens are allowed). Kernels are compiled separately with and without masks.
"""

import torch
import triton
import triton.language as tl

from ..core.triton_support import cdiv, require_contiguous


def masked_logits(logits: torch.Tensor, masks: torch.Tensor | None, mask_rows: torch.Tensor | None) -> torch.Tensor:
    """Return logits [B, V] with -inf for tokens without a bit in the row's mask (NaN stays NaN)."""
    if masks is None or mask_rows is None:
        return logits
    tokens = torch.arange(logits.shape[1], device=logits.device)
    words = masks[mask_rows.clamp_min(0).long()][:, tokens // 32]
    allowed = ((words >> (tokens % 32).to(torch.int32)) & 1).bool() | (mask_rows < 0)[:, None]
    return torch.where(allowed | logits.isnan(), logits, float("-inf"))


def check_masks(op: str, logits: torch.Tensor, masks: torch.Tensor | None, mask_rows: torch.Tensor | None) -> None:
    """Raise ValueError for masks that do not match the logits."""
    if masks is None or mask_rows is None:
        if masks is not mask_rows:
            raise ValueError(f"{op}: masks and mask_rows must be given together")
        return
    require_contiguous(op, masks=masks, mask_rows=mask_rows)
    words = cdiv(logits.shape[1], 32)
    if masks.shape[1] != words or mask_rows.shape != logits.shape[:1]:
        raise ValueError(
            f"{op}: masks {tuple(masks.shape)} and mask_rows {tuple(mask_rows.shape)} do not match logits "
            f"{tuple(logits.shape)}; a mask has {words} words, and each row an entry of mask_rows"
        )


@triton.jit
def allow(logit, token, inside, mask, mask_row):
    """Return the logits of tokens, -inf if the row's mask has no bit; `mask_row`: index of the mask, -1 for none."""
    word = tl.where(mask_row >= 0, tl.load(mask + token // 32, mask=inside, other=-1), -1)
    return tl.where(((word >> (token % 32)) & 1) != 0, logit, float("-inf"))
