"""LoRA for a batch of mixed adapters, as one semantic op: what the graph means before a pass lowers it to plan, shrink and expand."""
from collections.abc import Sequence

import torch

from . import lora_expand, lora_plan, lora_shrink
from .registry import register


def lora_reference(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter_index: torch.Tensor, slices: Sequence[int]) -> torch.Tensor:
    """delta[t, slice i] = b[slot, slice i] @ (a[slot, i*R:(i+1)*R] @ x[t]), slot = adapter_index[t].

    x              [T, K] model dtype
    a              [S, n*R, K] like x: n packed linears (q/k/v, gate/up) share one input
    b              [S, N, R] like x, alpha / rank already folded in
    adapter_index  [T] int32, -1 = no adapter: zeros
    slices         the n output widths, adding up to N
    returns        [T, N]; the ranks' activations are accumulated in fp32 and rounded to b's dtype once between the two products
    """
    ranks = b.shape[2]
    delta = torch.zeros(x.shape[0], b.shape[1], dtype=b.dtype, device=b.device)
    for slot in adapter_index.unique().tolist():
        if slot < 0:
            continue
        tokens = (adapter_index == slot).nonzero().squeeze(1)
        shrunk = (x[tokens].float() @ a[slot].float().T).to(b.dtype).float()
        start = 0
        for i, width in enumerate(slices):
            product = shrunk[:, i * ranks:(i + 1) * ranks] @ b[slot, start:start + width].float().T
            delta[tokens, start:start + width] = product.to(b.dtype)
            start += width
    return delta


def lora_fake(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter_index: torch.Tensor, slices: Sequence[int]) -> torch.Tensor:
    return b.new_empty((x.shape[0], b.shape[1]))


def lora_launch(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter_index: torch.Tensor, slices: Sequence[int],
           *, out: tuple[torch.Tensor, ...], sm_budget: int | None = None, pdl: bool = False) -> None:
    """Plan, shrink and expand in a row: right, and what an unlowered graph runs."""
    tokens, tile = x.shape[0], lora_plan.lora_tile(x.shape[0])
    splits = lora_plan.lora_splits(x.shape[1], tokens)
    plan = lora_plan.lora_plan_fake(adapter_index, a.shape[0], tile)
    lora_plan.lora_plan_launch(adapter_index, a.shape[0], tile, out=plan, sm_budget=sm_budget, pdl=pdl)
    planes = lora_shrink.lora_shrink_fake(x, a, *plan, tile, splits)
    lora_shrink.lora_shrink_launch(x, a, *plan, tile, splits, out=(planes,), sm_budget=sm_budget)
    lora_expand.lora_expand_launch(planes, b, *plan, tile, slices, out=out, sm_budget=sm_budget, pdl=True)


lora = register("lora", lora_reference, lora_fake, lora_launch)
