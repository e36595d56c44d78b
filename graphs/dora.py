"""Parts of adapters that depend on the base's weights: gains of DoRA (arXiv 2402.09353), shifts of biases."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from .adapter import Adapter
from .adapter_config import AdapterError

ROWS_AT_ONCE = 512  # of a weight in fp64: 56 MiB for 14,336 columns
Lookup = Callable[[str], torch.Tensor]
"""Returns a tensor of the checkpoint by its name, with the graph's head layout."""


def resolved(
    adapter: Adapter,
    lookup: Lookup,
    device: torch.device | None = None,
    device_calls: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> Adapter:
    """Return an adapter whose parts are stacks: `lora_gain` and `lora_shift`, fp32 [N], and B times DoRA's factor.

    DoRA gives y = g * (W x) + g * s * B A x + bias, with g_i = m_i / ||W_i + s B_i A||; the gain is g - 1. A shift is
    s times the bias of B, or a trained bias less the base's. The norms are computed in fp64 from the checkpoint's
    weights, to which the magnitudes were trained, on `device` and in pieces, each within `device_calls`. Raises
    AdapterError for a norm of zero.
    """
    if not adapter.parts:
        return adapter
    tensors, parts = dict(adapter.tensors), {}
    for module, kinds in adapter.parts.items():
        stacks: dict[str, torch.Tensor] = {}
        if "magnitude" in kinds:
            factor = _factor(adapter, module, lookup, device, device_calls)
            a, b = tensors[module]
            tensors[module] = a, (b.double() * factor.unsqueeze(1)).float()
            stacks["lora_gain"] = (factor - 1.0).float()
        if "lora_bias" in kinds:
            stacks["lora_shift"] = kinds["lora_bias"] * adapter.scaling[module]
        if "bias" in kinds:
            change = kinds["bias"] - lookup(f"{module}.bias").float().cpu()
            stacks["lora_shift"] = stacks["lora_shift"] + change if "lora_shift" in stacks else change
        parts[module] = stacks
    return replace(adapter, tensors=tensors, parts=parts)


def _factor(
    adapter: Adapter,
    module: str,
    lookup: Lookup,
    device: torch.device | None,
    device_calls: AbstractContextManager[Any],
) -> torch.Tensor:
    """Return DoRA's factor of each output, fp64 [N]; 1 for the padding of heads."""
    magnitude = adapter.parts[module]["magnitude"].double()
    norms = weight_norms(module, *adapter.tensors[module], adapter.scaling[module], lookup, device, device_calls)
    padding = (magnitude == 0) & (norms == 0)
    factor = torch.where(padding, 1.0, magnitude / norms)
    if not bool(torch.isfinite(factor.float()).all()):
        row = int((~torch.isfinite(factor.float())).nonzero()[0])
        raise AdapterError(
            f"{module}: the norm of row {row} of the base's weight with LoRA is {norms[row]:g}, so that its magnitude "
            f"{magnitude[row]:g} cannot be reached: the adapter was trained on another base; use that one"
        )
    return factor


def weight_norms(
    module: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    lookup: Lookup,
    device: torch.device | None = None,
    device_calls: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> torch.Tensor:
    """Return ||W_i + scaling * B_i A|| of each row i, fp64 [N], for a [r, K] and b [N, r]; see `resolved`."""
    weight = lookup(f"{module}.weight")
    scales = lookup(f"{module}.weight_scale") if weight.element_size() == 1 else None  # stored in eight bits
    norms = torch.empty(len(b), dtype=torch.float64)
    with device_calls:
        wide_a = a.to(device).double() * scaling
    for first in range(0, len(b), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        with device_calls:
            rows = weight[part].to(device).double()
            if scales is not None:
                rows *= scales[part].to(device).double()
            norms[part] = rows.addmm_(b[part].to(device).double(), wide_a).square_().sum(1).sqrt().cpu()
    return norms
