"""Evaluate recipes: read, slice, pack, transform and quantize a program's weights."""

from collections.abc import Callable
from typing import Any

import torch

from ...ops.elementwise.hadamard import reference as hadamard_reference
from ...ops.elementwise.quantize import E4M3
from ...ops.elementwise.quantize import reference as quantize_rowwise_reference
from .recipe import Recipe, RecipeError, rounded_name, share_of

LARGEST_BALANCE = 16  # log2 of the largest factor
ROWS_AT_ONCE = 8192  # rows quantized together: the fp32 copy of a 128256 x 4096 matrix would be 2 GB
GPU_VALUES = 1 << 25  # the same for a GPU, if it is more: narrow rows would not keep it busy


def quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values [..., K] of `dtype`, fp32 scale [...]) of a weight [..., K].

    The result is that of `ops.quantize_rowwise`; blocks of rows are quantized one by one to save memory.
    """
    values = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    scales = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    rows, width = weight.reshape(-1, weight.shape[-1]), weight.shape[-1]
    flat_values, flat_scales = values.view(-1, width), scales.view(-1)
    count = ROWS_AT_ONCE if weight.device.type == "cpu" else max(ROWS_AT_ONCE, GPU_VALUES // max(1, width))
    for first in range(0, rows.shape[0], count):
        part = slice(first, first + count)
        flat_values[part], flat_scales[part] = quantize_rowwise_reference(rows[part], dtype, rotate)
    return values, scales


def _unchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def materialize(
    recipe: Recipe,
    lookup: Callable[[str], torch.Tensor],
    memo: dict[Recipe, Any] | None = None,
    bring: Callable[[str, torch.Tensor], torch.Tensor] = _unchanged,
) -> torch.Tensor:
    """Return the tensor of `recipe`, on any device including meta.

    `lookup(name)` returns the checkpoint's (or an adapter's) tensor, or another object with a `shape` and `narrow`.
    `bring(name, tensor)` is applied to it, or to its slice, before any computation, for example to move it to a device.
    `memo` stores `quantize` results, so that values and scales are computed once; drop it after both have been read.
    """
    result = _evaluate(recipe, lookup, {} if memo is None else memo, bring)
    if isinstance(result, tuple):
        raise RecipeError(f"{recipe} has two outputs; select one with item(recipe, 0) or item(recipe, 1)")
    return result


def _evaluate(
    recipe: Recipe,
    lookup: Callable[[str], torch.Tensor],
    memo: dict[Recipe, Any],
    bring: Callable[[str, torch.Tensor], torch.Tensor],
) -> Any:
    if recipe.op == "param":
        return bring(recipe.attrs["name"], _found(recipe, lookup))
    if recipe.op == "slice" and recipe.args[0].op == "param":
        return bring(recipe.args[0].attrs["name"], _slice(_found(recipe.args[0], lookup), **recipe.attrs))
    if recipe.op == "calibrated":
        try:
            found = bring(recipe.attrs["name"], lookup(recipe.attrs["name"]))
        except KeyError:
            return torch.zeros(recipe.attrs["shape"])
        wanted = recipe.attrs["shape"]  # several layers at once have a leading dimension of layers
        if tuple(found.shape[max(found.dim() - len(wanted), 0) :]) != wanted:
            raise RecipeError(
                f"{recipe} is {tuple(found.shape)}, but the model needs {recipe.attrs['shape']}: calibrate again, this "
                "calibration is of another model"
            )
        return found.float()
    if recipe.op == "zeros":
        return torch.zeros(recipe.attrs["shape"], dtype=getattr(torch, recipe.attrs["dtype"]))
    if recipe.op == "rounded":
        try:
            return lookup(rounded_name(recipe))
        except KeyError as error:
            raise RecipeError(
                f"the weights have no tensor {rounded_name(recipe)!r}: create it with `sidestream calibrate --round`, "
                "or do not set rounded_weights"
            ) from error
    if recipe in memo:
        return memo[recipe]
    operands = [_evaluate(arg, lookup, memo, bring) for arg in recipe.args]
    first, attrs = operands[0], recipe.attrs
    if recipe.op == "item":
        return first[attrs["index"]]
    if any(isinstance(operand, tuple) for operand in operands):
        raise RecipeError(f"{recipe} uses both outputs of a quantize recipe; select one with item(recipe, index)")
    if recipe.op == "quantize":
        memo[recipe] = quantize_weight(first, getattr(torch, attrs["dtype"]), attrs["rotate"])
        return memo[recipe]
    if recipe.op == "cat":
        devices = [operand.device for operand, arg in zip(operands, recipe.args, strict=True) if arg.op != "zeros"]
        device = devices[0] if devices else first.device
        return torch.cat([operand.to(device) for operand in operands], dim=attrs["dim"])
    if recipe.op == "pad":
        missing = attrs["size"] - first.shape[attrs["dim"]]
        if not missing:
            return first
        shape = [missing if dim == attrs["dim"] else size for dim, size in enumerate(first.shape)]
        return torch.cat([first, first.new_zeros(shape)], dim=attrs["dim"])
    if recipe.op == "slice":
        return _slice(first, **attrs)
    if recipe.op == "unsqueeze":
        return first.unsqueeze(attrs["dim"])
    if recipe.op == "transpose":
        return first.transpose(attrs["dim0"], attrs["dim1"]).contiguous()
    if recipe.op == "hadamard":
        blocks = first.movedim(attrs["dim"], -1).unflatten(-1, (-1, attrs["width"]))
        return hadamard_reference(blocks).flatten(-2).movedim(-1, attrs["dim"]).contiguous()
    if recipe.op == "dequantize":
        return (first.float() * operands[1].to(first.device)).to(getattr(torch, attrs["dtype"]))
    if recipe.op == "row_scales":
        return first.float().squeeze(-1)
    if recipe.op == "multiply":
        return (first.float() * operands[1].to(first.device).float()).to(first.dtype)
    if recipe.op == "smooth":
        exponents = operands[1].to(first.device)  # [K], or layers [L, K] of stacks [L, N, K] or [L, K, R]
        shape = [1] * first.dim()
        shape[attrs["dim"]] = exponents.shape[-1]
        if exponents.dim() == 2:
            shape[0] = exponents.shape[0]
        return first * torch.exp2(attrs["sign"] * exponents).to(first.dtype).view(shape)
    if recipe.op == "key_balance":
        query, key, gain, *biases = operands
        return key_balance_factors(query, key, gain, attrs["kv_heads"], attrs["width"], tuple(biases))
    if recipe.op == "norm_balance":
        energies = [weight.float().square().view(2, -1).mean(0) for weight in operands]
        return balance_of(*energies).expand(attrs["kv_heads"], -1)
    if recipe.op == "scale":
        return (first.float() * attrs["factor"]).to(first.dtype)
    return first.to(getattr(torch, attrs["dtype"]))


def _found(recipe: Recipe, lookup: Callable[[str], torch.Tensor]) -> torch.Tensor:
    try:
        return lookup(recipe.attrs["name"])
    except KeyError as error:
        raise RecipeError(f"the weights have no tensor {recipe.attrs['name']!r}") from error


def _slice(tensor: torch.Tensor, dim: int, rank: int, world: int, multiple: int) -> torch.Tensor:
    """Return part `rank` of `world` along `dim`: a view, or a zero-padded copy at the end of the tensor."""
    dim %= len(tensor.shape)
    share = share_of(tensor.shape[dim], world, multiple)
    start, end = (min(place * share, tensor.shape[dim]) for place in (rank, rank + 1))
    part = tensor.narrow(dim, start, end - start)
    if end - start == share:
        return part
    missing = [share - (end - start) if place == dim else size for place, size in enumerate(tensor.shape)]
    return torch.cat([part, part.new_zeros(missing)], dim=dim)


def key_balance_factors(
    query: torch.Tensor,
    key: torch.Tensor,
    gain: torch.Tensor,
    kv_heads: int,
    width: int,
    biases: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Return the value of a `key_balance` recipe, fp32 [kv_heads, width / 2]."""

    def energy(weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        """Return the squared sizes [kv heads, pairs], summed over all query heads of a KV head."""
        rows = torch.cat([(part.float() * gain.float()).square().sum(-1) for part in weight.split(ROWS_AT_ONCE)])
        rows = sum((each.float().square() for each in bias), rows)
        return rows.view(kv_heads, -1, 2, width // 2).mean((1, 2))

    return balance_of(energy(query, *biases[:1]), energy(key, *biases[1:]))


def balance_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the power of two nearest to sqrt(|q| / |k|), from squared sizes; 1 if one of them is zero."""
    ratio = query / key
    exponent = (ratio.log2() / 4).round().clamp(-LARGEST_BALANCE, LARGEST_BALANCE)
    return torch.where(torch.isfinite(ratio) & (ratio > 0), torch.exp2(exponent), 1.0)
