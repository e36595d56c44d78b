"""The weighted sum of LoRA adapters as one adapter, equal to PEFT's `add_weighted_adapter` with `cat`."""

from collections.abc import Sequence

import torch

from ...graphs.adapter import Adapter
from ...graphs.families import VOCABULARY_TARGETS
from ...graphs.moe.adapter_layouts import LINEARS

WeightedAdapters = Sequence[tuple[Adapter, float]]


def sum_obstacle(adapter: Adapter) -> str:
    """Return why an adapter cannot be part of a sum, "" if it can. PEFT defines only sums of LoRA on projections."""
    kinds = [*adapter.kinds, *(target for target in adapter.targets if target in (*VOCABULARY_TARGETS, *LINEARS))]
    kinds += ["an invocation (aLoRA)"] if adapter.invocation else []
    return f"it has {', '.join(kinds)} besides plain LoRA" if kinds else ""


def weighted_sum(parts: WeightedAdapters, content_hash: str) -> Adapter:
    """Return the sum of w B A over adapters: A's rows one below the other, and B's columns times scaling and weight.

    Tensors are fp32; there are none if the adapters have none. A LoRA of a draft is left out, which changes no output.
    """
    modules = dict.fromkeys(module for adapter, _ in parts for module in adapter.tensors)
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in modules:
        pairs = [
            (*adapter.tensors[module], weight * adapter.scaling[module])
            for adapter, weight in parts
            if module in adapter.tensors
        ]
        tensors[module] = (
            torch.cat([a.float() for a, _, _ in pairs]),
            torch.cat([b.float() * factor for _, b, factor in pairs], dim=1),
        )
    return Adapter(
        rank=sum(adapter.rank for adapter, _ in parts),
        scaling=dict.fromkeys(modules, 1.0),
        tensors=tensors,
        targets=tuple(dict.fromkeys(target for adapter, _ in parts for target in adapter.targets)),
        content_hash=content_hash,
    )
