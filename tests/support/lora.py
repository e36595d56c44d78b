"""Random LoRA problems: activations, stacked adapters, and the plan that says which tokens meet which."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from sidestream.ops.elementwise.quantize import reference as quantize_rowwise_reference
from sidestream.ops.lora.plan import lora_plan_reference, lora_splits, lora_tile


@dataclass(frozen=True)
class LoraCase:
    """Inputs of the four LoRA ops; outputs have a standard deviation of about 1."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    adapter_index: torch.Tensor
    token_order: torch.Tensor
    tiles: torch.Tensor
    tile: int
    splits: int
    slices: list[int]
    a_scale: torch.Tensor | None = None
    b_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None

    @property
    def lora(self) -> tuple[Any, ...]:
        return self.x, self.a, self.b, self.adapter_index, self.slices, self.a_scale, self.b_scale, self.x_scale

    @property
    def shrink(self) -> tuple[Any, ...]:
        return self.x, self.a, self.token_order, self.tiles, self.tile, self.splits, self.a_scale, self.x_scale

    def expand(self, planes: torch.Tensor) -> tuple[Any, ...]:
        return planes, self.b, self.token_order, self.tiles, self.tile, self.slices, self.b_scale

    def quantized(self, activations: bool, dtype: torch.dtype = torch.float8_e4m3fn) -> "LoraCase":
        """The same with e4m3 or int8 stacks and a scale a row; the activations too if asked."""
        (a, a_scale), (b, b_scale) = (
            quantize_rowwise_reference(self.a, dtype),
            quantize_rowwise_reference(self.b, dtype),
        )
        x, x_scale = quantize_rowwise_reference(self.x, dtype) if activations else (self.x, None)
        return replace(self, x=x, a=a, b=b, a_scale=a_scale, b_scale=b_scale, x_scale=x_scale)


def lora_case(
    tokens: int,
    k: int,
    ranks: int,
    slices: list[int],
    *,
    slots: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    tile: int | None = None,
    splits: int | None = None,
    adapter_index: torch.Tensor | None = None,
) -> LoraCase:
    """A case of `len(slices)` packed linears; about a fifth of the tokens have no adapter unless `adapter_index`
    says otherwise.
    """
    if adapter_index is None:
        adapter_index = torch.randint(0, slots, (tokens,)).where(torch.rand(tokens) > 0.2, -1)
    adapter_index = adapter_index.to(device=device, dtype=torch.int32)
    tile = tile or lora_tile(tokens)
    token_order, tiles = lora_plan_reference(adapter_index, slots, tile)
    return LoraCase(
        x=torch.randn(tokens, k, device=device).to(dtype),
        a=(torch.randn(slots, len(slices) * ranks, k, device=device) / k**0.5).to(dtype),
        b=(torch.randn(slots, sum(slices), ranks, device=device) / ranks**0.5).to(dtype),
        adapter_index=adapter_index,
        token_order=token_order,
        tiles=tiles,
        tile=tile,
        splits=splits or lora_splits(k, tokens),
        slices=slices,
    )


def stack_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each adapter stack: `...q_proj.lora_a` [S, R, K] and `...q_proj.lora_b` [S, N, R]."""
    return {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if ".lora_" in name}
