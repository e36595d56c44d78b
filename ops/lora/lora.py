"""`lora`: LoRA for a batch of mixed adapters as one semantic op, which a pass lowers to plan, shrink and expand."""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from ..core.registry import register
from ..core.reproducible_sums import product
from . import expand as lora_expand
from . import plan as lora_plan
from . import shrink as lora_shrink
from .shrink import dequantized


def reference(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter_index: torch.Tensor,
    slices: Sequence[int],
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    x_scale: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return delta[t, slice i] = b[slot, slice i] @ (a[slot, i*R:(i+1)*R] @ x[t]), with slot = adapter_index[t].

    x              [T, K] model dtype, or e4m3 or int8 with x_scale [T] fp32
    a              [S, n*R, K] model dtype, or e4m3 or int8 with a_scale [S, n*R] fp32: n packed linears (q/k/v,
                   gate/up) share one input
    b              [S, N, R] model dtype, or e4m3 or int8 with b_scale [S, N] fp32; includes alpha / rank
    adapter_index  [T] int32, -1 = no adapter: zeros
    slices         the n output widths, adding up to N
    returns        [T, N] in b's dtype (bf16 for an 8-bit b); the ranks are summed in fp32 and rounded to that dtype
                   once
    """
    ranks = b.shape[2]
    delta = fake(x, a, b, adapter_index, slices).zero_()
    rows = dequantized(x, x_scale)
    for slot in adapter_index.unique().tolist():
        if slot < 0:
            continue
        tokens = (adapter_index == slot).nonzero().squeeze(1)
        shrinking = dequantized(a[slot], None if a_scale is None else a_scale[slot])
        shrunk = product(rows[tokens], shrinking, torch.float32).to(delta.dtype)
        expanding = dequantized(b[slot], None if b_scale is None else b_scale[slot])
        start = 0
        for i, width in enumerate(slices):
            own = shrunk[:, i * ranks : (i + 1) * ranks]
            delta[tokens, start : start + width] = product(own, expanding[start : start + width], delta.dtype)
            start += width
    return delta


def fake(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return b.new_empty((x.shape[0], b.shape[1]), dtype=lora_expand.delta_dtype(b))


def launch(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter_index: torch.Tensor,
    slices: Sequence[int],
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    x_scale: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Run plan, shrink and expand, for graphs that are not lowered by a pass."""
    tokens, tile = x.shape[0], lora_plan.lora_tile(x.shape[0])
    splits = lora_plan.lora_splits(x.shape[1], tokens)
    plan = lora_plan.lora_plan_fake(adapter_index, a.shape[0], tile)
    lora_plan.lora_plan_launch(adapter_index, a.shape[0], tile, out=plan, sm_budget=sm_budget, pdl=pdl)
    planes = lora_shrink.fake(x, a, *plan, tile, splits)
    lora_shrink.launch(x, a, *plan, tile, splits, a_scale, x_scale, out=(planes,), sm_budget=sm_budget)
    lora_expand.launch(planes, b, *plan, tile, slices, b_scale, out=out, sm_budget=sm_budget, pdl=True)


lora = register("lora", reference, fake, launch, kind="lora_shrink", family="lora")
