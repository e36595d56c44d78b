"""Recipes: how a program's weights come from a checkpoint's tensors.

A recipe is a small expression tree over checkpoint names (pack, cast, quantize). Passes rewrite recipes instead of
tensors, so a weight is read, transformed and dropped one at a time, and a saved program says by itself what it must be
bound to.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...ops.core.triton_support import cdiv
from ...ops.elementwise.hadamard import reference as hadamard_reference
from ...ops.elementwise.quantize import E4M3
from ...ops.elementwise.quantize import reference as quantize_rowwise_reference

LARGEST_BALANCE = 16  # as a power of two
ROWS_AT_ONCE = 8192  # rows quantized together: the fp32 copy of a 128256 x 4096 matrix would be 2 GB

# op -> (number of operands, None = one or more; attribute names)
_SHAPES: dict[str, tuple[int | None, frozenset[str]]] = {
    "param": (0, frozenset({"name"})),
    "calibrated": (0, frozenset({"name", "shape"})),
    "cat": (None, frozenset({"dim"})),
    "unsqueeze": (1, frozenset({"dim"})),
    "transpose": (1, frozenset({"dim0", "dim1"})),
    "pad": (1, frozenset({"dim", "size"})),
    "slice": (1, frozenset({"dim", "rank", "world", "multiple"})),
    "zeros": (0, frozenset({"shape", "dtype"})),
    "hadamard": (1, frozenset({"dim", "width"})),
    "scale": (1, frozenset({"factor"})),
    "multiply": (2, frozenset()),
    "key_balance": (None, frozenset({"kv_heads", "width"})),
    "norm_balance": (2, frozenset({"kv_heads"})),
    "smooth": (2, frozenset({"sign", "dim"})),
    "cast": (1, frozenset({"dtype"})),
    "quantize": (1, frozenset({"dtype", "rotate"})),
    "dequantize": (2, frozenset({"stored", "dtype"})),
    "row_scales": (1, frozenset()),
    "item": (1, frozenset({"index"})),
    "rounded": (1, frozenset({"index"})),
}


class RecipeError(ValueError):
    """A recipe is malformed, or a tensor that it names is missing."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """One node of the tree: `op` applied to `args` (recipes) with `attrs` (plain values). Build it with the functions
    below.

    Equal trees are equal and hash alike. Raises RecipeError for an unknown op or wrong operands.
    """

    op: str
    args: tuple["Recipe", ...]
    attrs: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "attrs", dict(self.attrs))
        if self.op not in _SHAPES:
            raise RecipeError(f"unknown recipe op {self.op!r}; known: {', '.join(sorted(_SHAPES))}")
        count, names = _SHAPES[self.op]
        if not all(isinstance(arg, Recipe) for arg in self.args):
            raise RecipeError(
                f"recipe {self.op!r} takes recipes as operands, got {[type(arg).__name__ for arg in self.args]}"
            )
        if len(self.args) != count if count is not None else not self.args:
            raise RecipeError(
                f"recipe {self.op!r} takes {count if count is not None else 'one or more'} operands, got "
                f"{len(self.args)}"
            )
        if set(self.attrs) != names:
            raise RecipeError(f"recipe {self.op!r} takes the attributes {sorted(names)}, got {sorted(self.attrs)}")
        if self.op == "item" and (self.args[0].op != "quantize" or self.attrs["index"] not in (0, 1)):
            raise RecipeError("item(recipe, index) picks output 0 (values) or 1 (scales) of a quantize recipe")

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.op, self.args, tuple(sorted(self.attrs.items())))

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Recipe) and self._hash == other._hash and self._key == other._key)

    def sources(self) -> frozenset[str]:
        """The checkpoint names that this recipe reads."""
        if self.op in ("param", "calibrated"):
            return frozenset({self.attrs["name"]})
        return frozenset().union(*(arg.sources() for arg in self.args))

    def __str__(self) -> str:
        if self.op in ("param", "calibrated"):
            return str(self.attrs["name"])
        if self.op == "item":
            return f"{self.args[0]}[{self.attrs['index']}]"
        attrs = (f"{name}={value}" for name, value in sorted(self.attrs.items()))
        return f"{self.op}({', '.join([*map(str, self.args), *attrs])})"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"op": self.op, "args": [arg.to_json() for arg in self.args], "attrs": dict(self.attrs)}

    @staticmethod
    def from_json(value: Any) -> "Recipe":
        """The recipe that `to_json` wrote. Raises RecipeError for anything else."""
        if (
            not isinstance(value, dict)
            or set(value) != {"op", "args", "attrs"}
            or not isinstance(value["args"], list)
            or not isinstance(value["attrs"], dict)
        ):
            raise RecipeError(f"not a recipe: {value!r}")
        attrs = {name: tuple(attr) if isinstance(attr, list) else attr for name, attr in value["attrs"].items()}
        return Recipe(value["op"], tuple(Recipe.from_json(arg) for arg in value["args"]), attrs)


def param(name: str) -> Recipe:
    """The checkpoint tensor `name` as it is."""
    return Recipe("param", (), {"name": name})


def calibrated(name: str, shape: tuple[int, ...]) -> Recipe:
    """The fp32 tensor `name` of a calibration; zeros where there is none, so that a program can be made before
    anything was measured.
    """
    return Recipe("calibrated", (), {"name": name, "shape": tuple(shape)})


def cat(dim: int, recipes: Iterable[Recipe]) -> Recipe:
    """Concatenation along `dim` (a single recipe is returned as it is)."""
    parts = tuple(recipes)
    return parts[0] if len(parts) == 1 else Recipe("cat", parts, {"dim": dim})


def unsqueeze(recipe: Recipe, dim: int) -> Recipe:
    """A new dimension of size 1 at `dim`."""
    return Recipe("unsqueeze", (recipe,), {"dim": dim})


def transpose(recipe: Recipe, dim0: int, dim1: int) -> Recipe:
    """Two dimensions swapped (the result is contiguous)."""
    return Recipe("transpose", (recipe,), {"dim0": dim0, "dim1": dim1})


def pad(recipe: Recipe, dim: int, size: int) -> Recipe:
    """Zeros after the tensor's end until `dim` has `size` (an adapter's rank in a wider stack)."""
    return Recipe("pad", (recipe,), {"dim": dim, "size": size})


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Recipe:
    """Zeros: the part of a packed LoRA stack whose projection has no adapter."""
    return Recipe("zeros", (), {"shape": tuple(shape), "dtype": str(dtype).removeprefix("torch.")})


def hadamard(recipe: Recipe, dim: int, width: int) -> Recipe:
    """Normalised Walsh-Hadamard transform of each block of `width` (a power of two) along `dim`, in fp32, rounded once
    to the tensor's own dtype.

    What is rotated like this on its output (W_v, B_v: dim of the heads' channels) and on its consumer's input (W_o,
    A_o) computes the same.
    """
    return Recipe("hadamard", (recipe,), {"dim": dim, "width": width})


def scale(recipe: Recipe, factor: float) -> Recipe:
    """Every element times `factor`, computed in fp32 and rounded once to the tensor's own dtype; of a weight that is
    stored in eight bits, every scale.
    """
    if recipe.op == "dequantize":
        values, scales = recipe.args
        return Recipe("dequantize", (values, scale(scales, factor)), recipe.attrs)
    return Recipe("scale", (recipe,), {"factor": float(factor)})


def multiply(recipe: Recipe, factors: Recipe) -> Recipe:
    """Elementwise product of two tensors of one shape, in fp32, rounded once to the first one's dtype."""
    return Recipe("multiply", (recipe, factors), {})


def key_balance(
    query: Recipe, key: Recipe, gain: Recipe, kv_heads: int, width: int, biases: tuple[Recipe, ...] = ()
) -> Recipe:
    """fp32 [kv_heads, width / 2]: by RoPE pair of each KV head, how much larger keys are to become (`rope_append`),
    told from the weights alone.

    query [HQ * width, K], key [kv_heads * width, K] and the norm's gain [K] that both read through; `biases`: q's and
    k's. A pair's size is the norm of its rows times the gain, and of its biases; sqrt(size in q / size in k) makes both
    alike, which makes |q| |k|, and so the error of a score, as small as factors can. Rounded to a power of two, so that
    no rounding changes but the quantizer's; 1 where a pair is zero.
    """
    return Recipe("key_balance", (query, key, gain, *biases), {"kv_heads": kv_heads, "width": width})


def norm_balance(query: Recipe, key: Recipe, kv_heads: int) -> Recipe:
    """`key_balance` for heads that are normed: their sizes are the weights [width] of the norms of q's and k's heads,
    alike in all heads.
    """
    return Recipe("norm_balance", (query, key), {"kv_heads": kv_heads})


def smooth(recipe: Recipe, exponents: Recipe, sign: int, dim: int) -> Recipe:
    """Dimension `dim` times 2^(sign * exponents), `exponents` [K] of whole numbers: exact in every float dtype."""
    return Recipe("smooth", (recipe, exponents), {"sign": sign, "dim": dim})


def share_of(size: int, world: int, multiple: int = 1) -> int:
    """What each of `world` ranks has of `size` rows or columns, rounded up to a multiple of `multiple`."""
    return cdiv(cdiv(size, world), multiple) * multiple


def slice_(recipe: Recipe, dim: int, rank: int, world: int, multiple: int = 1) -> Recipe:
    """Part `rank` of `world` parts of `share_of` along `dim`; the last parts are filled up with zeros."""
    return Recipe("slice", (recipe,), {"dim": dim, "rank": rank, "world": world, "multiple": multiple})


def cast(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """Converted to `dtype`."""
    return Recipe("cast", (recipe,), {"dtype": str(dtype).removeprefix("torch.")})


def quantize(recipe: Recipe, dtype: torch.dtype = E4M3, rotate: int = 0) -> Recipe:
    """The rows of a matrix [N, K] as `ops.quantize_rowwise` rounds them: two outputs, values [N, K] and fp32 scales
    [N]; pick one with `item`.
    """
    return Recipe("quantize", (recipe,), {"dtype": str(dtype).removeprefix("torch."), "rotate": rotate})


def dequantize(values: Recipe, scales: Recipe, stored: torch.dtype, dtype: torch.dtype) -> Recipe:
    """values [N, K] of the dtype `stored` times fp32 scales [N, 1], rounded to `dtype`."""
    names = {"stored": str(stored).removeprefix("torch."), "dtype": str(dtype).removeprefix("torch.")}
    return Recipe("dequantize", (values, scales), names)


def stored_parts(recipe: Recipe, dtype: torch.dtype) -> tuple[Recipe, Recipe] | None:
    """(values, scales [N]) of a weight, or of weights packed one below the other, whose values are stored in `dtype`;
    None for any other.
    """
    packed = recipe.op == "cat" and recipe.attrs["dim"] == 0
    parts = recipe.args if packed else (recipe,)
    if any(part.op != "dequantize" or part.attrs["stored"] != str(dtype).removeprefix("torch.") for part in parts):
        return None
    values, scales = (cat(0, [part.args[place] for part in parts]) for place in (0, 1))
    return values, Recipe("row_scales", (scales,), {})


def item(recipe: Recipe, index: int) -> Recipe:
    """Output `index` of a recipe with several: 0 = quantized values, 1 = scales."""
    return Recipe("item", (recipe,), {"index": index})


def rounded(values: Recipe, index: int) -> Recipe:
    """`item(values, index)` of a `quantize` recipe as another way to round has stored it (`sidestream calibrate
    --round`), instead of rounded to nearest while it is loaded; of weights packed one below the other each by itself.

    The tensor is looked up by `rounded_name`. What it was rounded from stays the operand, and is not evaluated. Of a
    part of a weight, the whole is what was rounded, and its values are cut as the weight was; a part of its columns
    keeps the scales of the whole rows.
    """
    (packed,) = values.args
    parts = packed.args if packed.op == "cat" and packed.attrs["dim"] == 0 else (packed,)
    return cat(0, [_rounded_part(part, values.attrs, index) for part in parts])


def _rounded_part(part: Recipe, attrs: Mapping[str, Any], index: int) -> Recipe:
    whole, cuts = _unsliced(part)
    found = Recipe("rounded", (Recipe("quantize", (whole,), attrs),), {"index": index})
    for cut in cuts:
        if index == 0 or cut["dim"] == 0:
            found = Recipe("slice", (found,), cut)
    return found


def _unsliced(recipe: Recipe) -> tuple[Recipe, tuple[Mapping[str, Any], ...]]:
    """What a recipe would be if nothing were cut, and the cuts, the first one first."""
    if not recipe.args:
        return recipe, ()
    operands = [_unsliced(operand) for operand in recipe.args]
    whole, cuts = operands[0]
    if recipe.op == "slice":
        return whole, (*cuts, recipe.attrs)
    return Recipe(recipe.op, tuple(operand for operand, _ in operands), recipe.attrs), cuts


def rounded_parts(recipe: Recipe) -> tuple[Recipe, ...]:
    """The `rounded` recipes that a weight's recipe is packed of; none where it is not."""
    parts = recipe.args if recipe.op == "cat" else (recipe,)
    found = (_unsliced(part)[0] for part in parts)
    return tuple(part for part in found if part.op == "rounded")


def rounded_from(recipe: Recipe) -> str:
    """The checkpoint tensor that a `rounded` or `quantize` recipe is made of, whatever was folded into it."""
    while recipe.args:
        recipe = recipe.args[0]
    return str(recipe)


def rounded_name(recipe: Recipe) -> str:
    """The name under which a `rounded` recipe looks its tensor up."""
    return f"{rounded_from(recipe)}.{('rounded', 'rounded_scale')[recipe.attrs['index']]}"


def quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., K] -> (values [..., K] of `dtype`, fp32 scale [...]), as `ops.quantize_rowwise` has it, some rows
    at a time.
    """
    values = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    scales = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    rows, flat_values, flat_scales = (
        weight.reshape(-1, weight.shape[-1]),
        values.view(-1, weight.shape[-1]),
        scales.view(-1),
    )
    for first in range(0, rows.shape[0], ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
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
    """The tensor that `recipe` describes.

    `lookup(name)` gives the checkpoint's tensor (or one adapter's). `bring(name, tensor)`: what becomes of it, or of
    the slice of it that is wanted, before anything is computed (it moves to a device). `memo` keeps `quantize` results
    only, so that values and scales are computed once; drop it when both have been taken. Works on any device, on meta
    tensors too.
    """
    result = _evaluate(recipe, lookup, {} if memo is None else memo, bring)
    if isinstance(result, tuple):
        raise RecipeError(f"{recipe} has two outputs; pick one with item(recipe, 0) or item(recipe, 1)")
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
        wanted = recipe.attrs["shape"]  # after a dimension of layers where several are made at once
        if tuple(found.shape[max(found.dim() - len(wanted), 0) :]) != wanted:
            raise RecipeError(
                f"{recipe} is {tuple(found.shape)}, the model needs {recipe.attrs['shape']}: it was calibrated for "
                "another model"
            )
        return found.float()
    if recipe.op == "zeros":
        return torch.zeros(recipe.attrs["shape"], dtype=getattr(torch, recipe.attrs["dtype"]))
    if recipe.op == "rounded":
        try:
            return lookup(rounded_name(recipe))
        except KeyError as error:
            raise RecipeError(
                f"the weights hold no tensor {rounded_name(recipe)!r}: rounded weights come from "
                "`sidestream calibrate --round`; leave rounded_weights out"
            ) from error
    if recipe in memo:
        return memo[recipe]
    operands = [_evaluate(arg, lookup, memo, bring) for arg in recipe.args]
    first, attrs = operands[0], recipe.attrs
    if recipe.op == "item":
        return first[attrs["index"]]
    if any(isinstance(operand, tuple) for operand in operands):
        raise RecipeError(f"{recipe} uses both outputs of a quantize recipe at once; pick one with item(recipe, index)")
    if recipe.op == "quantize":
        memo[recipe] = quantize_weight(first, getattr(torch, attrs["dtype"]), attrs["rotate"])
        return memo[recipe]
    if recipe.op == "cat":
        device = next(
            (operand.device for operand, arg in zip(operands, recipe.args, strict=True) if arg.op != "zeros"),
            first.device,
        )
        return torch.cat([operand.to(device) for operand in operands], dim=attrs["dim"])
    if recipe.op == "pad":
        missing = attrs["size"] - first.shape[attrs["dim"]]
        return torch.cat(
            [
                first,
                first.new_zeros([missing if dim == attrs["dim"] else size for dim, size in enumerate(first.shape)]),
            ],
            dim=attrs["dim"],
        )
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
        return first.float().flatten()
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
        return key_balance_factors(
            first, operands[1], operands[2], attrs["kv_heads"], attrs["width"], tuple(operands[3:])
        )
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
        raise RecipeError(f"the weights hold no tensor {recipe.attrs['name']!r}") from error


def _slice(tensor: torch.Tensor, dim: int, rank: int, world: int, multiple: int) -> torch.Tensor:
    """Part `rank` of `world`, a view; where parts are rounded up the last ones are filled with zeros."""
    dim %= tensor.dim()
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
    """What a `key_balance` recipe gives for these weights."""

    def energy(weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        """[kv heads, pairs], of all query heads of a KV head together."""
        rows = torch.cat([(part.float() * gain.float()).square().sum(-1) for part in weight.split(ROWS_AT_ONCE)])
        rows = sum((each.float().square() for each in bias), rows)
        return rows.view(kv_heads, -1, 2, width // 2).mean((1, 2))

    return balance_of(energy(query, *biases[:1]), energy(key, *biases[1:]))


def balance_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to sqrt(|q| / |k|), for squared sizes; 1 where one is zero."""
    ratio = query / key
    exponent = (ratio.log2() / 4).round().clamp(-LARGEST_BALANCE, LARGEST_BALANCE)
    return torch.where(torch.isfinite(ratio) & (ratio > 0), torch.exp2(exponent), 1.0)
