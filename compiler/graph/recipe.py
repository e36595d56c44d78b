"""Recipes: weights of a program as expressions over a checkpoint's tensors.

Passes rewrite recipes instead of tensors. So weights are read, transformed and freed one at a time, and a saved program
contains everything that is needed to bind it. `materialize.py` evaluates recipes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...ops.core.triton_support import cdiv
from ...ops.elementwise.quantize import E4M3

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
    """A recipe is malformed, or a tensor that it reads is missing."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """One node of the tree: `op` applied to `args` (recipes) with `attrs` (plain values).

    The functions of this module build recipes. Equal trees compare and hash equal. Raises RecipeError for an unknown op
    or wrong operands.
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
                f"operands of {self.op!r} must be recipes, got {[type(arg).__name__ for arg in self.args]}"
            )
        if len(self.args) != count if count is not None else not self.args:
            raise RecipeError(
                f"recipe {self.op!r} needs {count if count is not None else 'one or more'} operands, got "
                f"{len(self.args)}"
            )
        if set(self.attrs) != names:
            raise RecipeError(f"recipe {self.op!r} needs the attributes {sorted(names)}, got {sorted(self.attrs)}")
        if self.op == "item" and (self.args[0].op != "quantize" or self.attrs["index"] not in (0, 1)):
            raise RecipeError("item(recipe, index) selects output 0 (values) or 1 (scales) of a quantize recipe")

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
        """Return the names of the checkpoint tensors that this recipe reads."""
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
        """Return plain JSON values."""
        return {"op": self.op, "args": [arg.to_json() for arg in self.args], "attrs": dict(self.attrs)}

    @staticmethod
    def from_json(value: Any) -> "Recipe":
        """Return the recipe that `to_json` wrote. Raises RecipeError for anything else."""
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
    """Return the checkpoint tensor `name`."""
    return Recipe("param", (), {"name": name})


def calibrated(name: str, shape: tuple[int, ...]) -> Recipe:
    """Return the fp32 tensor `name` of a calibration; zeros without one, so that programs can be built before it."""
    return Recipe("calibrated", (), {"name": name, "shape": tuple(shape)})


def cat(dim: int, recipes: Iterable[Recipe]) -> Recipe:
    """Concatenate along `dim`; a single recipe is returned unchanged."""
    parts = tuple(recipes)
    return parts[0] if len(parts) == 1 else Recipe("cat", parts, {"dim": dim})


def unsqueeze(recipe: Recipe, dim: int) -> Recipe:
    """Insert a dimension of size 1 at `dim`."""
    return Recipe("unsqueeze", (recipe,), {"dim": dim})


def transpose(recipe: Recipe, dim0: int, dim1: int) -> Recipe:
    """Swap two dimensions; the result is contiguous."""
    return Recipe("transpose", (recipe,), {"dim0": dim0, "dim1": dim1})


def pad(recipe: Recipe, dim: int, size: int) -> Recipe:
    """Append zeros until `dim` has `size`, such as an adapter's rank in a larger stack."""
    return Recipe("pad", (recipe,), {"dim": dim, "size": size})


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Recipe:
    """Return zeros, such as the part of a packed LoRA stack for a projection without adapter."""
    return Recipe("zeros", (), {"shape": tuple(shape), "dtype": str(dtype).removeprefix("torch.")})


def hadamard(recipe: Recipe, dim: int, width: int) -> Recipe:
    """Apply a normalised Walsh-Hadamard transform to each block of `width` (a power of two) along `dim`.

    It is computed in fp32 and rounded once to the tensor's dtype. Rotating the outputs of one weight (W_v, B_v) and the
    inputs of its consumer (W_o, A_o) leaves the product unchanged.
    """
    return Recipe("hadamard", (recipe,), {"dim": dim, "width": width})


def scale(recipe: Recipe, factor: float) -> Recipe:
    """Multiply by `factor` in fp32, rounded once to the tensor's dtype; for eight-bit weights multiply the scales."""
    if recipe.op == "dequantize":
        values, scales = recipe.args
        return Recipe("dequantize", (values, scale(scales, factor)), recipe.attrs)
    return Recipe("scale", (recipe,), {"factor": float(factor)})


def multiply(recipe: Recipe, factors: Recipe) -> Recipe:
    """Multiply two tensors of one shape elementwise in fp32, rounded once to the first one's dtype."""
    return Recipe("multiply", (recipe, factors), {})


def key_balance(
    query: Recipe, key: Recipe, gain: Recipe, kv_heads: int, width: int, biases: tuple[Recipe, ...] = ()
) -> Recipe:
    """Return the keys' factors for the RoPE pairs of each KV head, fp32 [kv_heads, width / 2] (`rope_append`).

    query [HQ * width, K], key [kv_heads * width, K], gain [K] of the norm before both; `biases` of q and k. A pair's
    size is the norm of its rows times the gain, and of its biases. The factor sqrt(size in q / size in k) makes both
    sizes equal, which minimises |q| |k| and so the error of a score. It is rounded to a power of two, so that only the
    quantizer's rounding changes; it is 1 for a pair of zeros.
    """
    return Recipe("key_balance", (query, key, gain, *biases), {"kv_heads": kv_heads, "width": width})


def norm_balance(query: Recipe, key: Recipe, kv_heads: int) -> Recipe:
    """Return `key_balance` for heads with norms: sizes are the weights [width] of the norms of q's and k's heads."""
    return Recipe("norm_balance", (query, key), {"kv_heads": kv_heads})


def smooth(recipe: Recipe, exponents: Recipe, sign: int, dim: int) -> Recipe:
    """Multiply dimension `dim` by 2^(sign * exponents); this is exact for integer `exponents` [K]."""
    return Recipe("smooth", (recipe, exponents), {"sign": sign, "dim": dim})


def share_of(size: int, world: int, multiple: int = 1) -> int:
    """Return the number of rows or columns of each of `world` ranks, rounded up to a multiple of `multiple`."""
    return cdiv(cdiv(size, world), multiple) * multiple


def slice_(recipe: Recipe, dim: int, rank: int, world: int, multiple: int = 1) -> Recipe:
    """Return part `rank` of `world` parts of `share_of` along `dim`; the last parts are zero-padded."""
    return Recipe("slice", (recipe,), {"dim": dim, "rank": rank, "world": world, "multiple": multiple})


def cast(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """Convert to `dtype`."""
    return Recipe("cast", (recipe,), {"dtype": str(dtype).removeprefix("torch.")})


def quantize(recipe: Recipe, dtype: torch.dtype = E4M3, rotate: int = 0) -> Recipe:
    """Quantize the rows of [..., K] as `ops.quantize_rowwise`: values [..., K] and fp32 scales [...]; see `item`."""
    return Recipe("quantize", (recipe,), {"dtype": str(dtype).removeprefix("torch."), "rotate": rotate})


def dequantize(values: Recipe, scales: Recipe, stored: torch.dtype, dtype: torch.dtype) -> Recipe:
    """Return values [..., K] of the dtype `stored`, times fp32 scales [..., 1], rounded to `dtype`."""
    names = {"stored": str(stored).removeprefix("torch."), "dtype": str(dtype).removeprefix("torch.")}
    return Recipe("dequantize", (values, scales), names)


def stored_parts(recipe: Recipe, dtype: torch.dtype) -> tuple[Recipe, Recipe] | None:
    """Return (values, scales [...]) of a weight (or a packed one) that is stored in `dtype`; None for any other."""
    packed = recipe.op == "cat" and recipe.attrs["dim"] in (0, -2)
    parts = recipe.args if packed else (recipe,)
    if any(part.op != "dequantize" or part.attrs["stored"] != str(dtype).removeprefix("torch.") for part in parts):
        return None
    dim = recipe.attrs["dim"] if packed else 0
    values, scales = (cat(dim, [part.args[place] for part in parts]) for place in (0, 1))
    return values, Recipe("row_scales", (scales,), {})


def item(recipe: Recipe, index: int) -> Recipe:
    """Return output `index` of a `quantize` recipe: 0 = values, 1 = scales."""
    return Recipe("item", (recipe,), {"index": index})


def rounded(values: Recipe, index: int) -> Recipe:
    """Return `item(values, index)` of a `quantize` recipe, with the tensor of `sidestream calibrate --round`.

    The tensor's name is `rounded_name`; the parts of a packed weight have tensors of their own. The operand only
    describes the rounded weight and is not evaluated. Whole weights are rounded: a slice of a weight uses a slice of
    the values, and a slice of columns uses the scales of whole rows.
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
    """Return (a recipe without its slices, the slices in the order of their application)."""
    if not recipe.args:
        return recipe, ()
    operands = [_unsliced(operand) for operand in recipe.args]
    whole, cuts = operands[0]
    if recipe.op == "slice":
        return whole, (*cuts, recipe.attrs)
    return Recipe(recipe.op, tuple(operand for operand, _ in operands), recipe.attrs), cuts


def rounded_parts(recipe: Recipe) -> tuple[Recipe, ...]:
    """Return the `rounded` recipes that a weight's recipe is packed from, if any."""
    parts = recipe.args if recipe.op == "cat" else (recipe,)
    found = (_unsliced(part)[0] for part in parts)
    return tuple(part for part in found if part.op == "rounded")


def rounded_from(recipe: Recipe) -> str:
    """Return the checkpoint tensor at the root of a `rounded` or `quantize` recipe."""
    while recipe.args:
        recipe = recipe.args[0]
    return str(recipe)


def rounded_name(recipe: Recipe) -> str:
    """Return the tensor name of a `rounded` recipe."""
    return f"{rounded_from(recipe)}.{('rounded', 'rounded_scale')[recipe.attrs['index']]}"


class SliceError(ValueError):
    """A recipe can't be cut at the requested place."""


@dataclass(frozen=True)
class Share:
    """Part `rank` of `world` parts of sizes rounded up to a multiple of `multiple`."""

    rank: int
    world: int
    multiple: int = 1

    def of(self, size: int) -> int:
        """Return the size of each part."""
        return share_of(size, self.world, self.multiple)

    def divides(self, size: int) -> bool:
        """Whether no part is padded."""
        return self.of(size) * self.world == size


def sliced(recipe: Recipe, dim: int, share: Share, size: int) -> Recipe:
    """Return part `share` of a recipe along `dim`, which has `size`.

    The slice moves towards the loaded tensors as far as the result stays the same, so that less is read. Raises
    SliceError if it would separate columns that are rotated together.
    """

    def cut(operand: Recipe) -> Recipe:
        return sliced(operand, dim, share, size)

    op, args, attrs = recipe.op, recipe.args, recipe.attrs
    if op == "zeros":
        return Recipe(op, (), {**attrs, "shape": (*attrs["shape"][:dim], share.of(size), *attrs["shape"][dim + 1 :])})
    if op == "hadamard" and attrs["dim"] == dim and (not share.divides(size) or share.of(size) % attrs["width"]):
        raise SliceError(f"blocks of {attrs['width']} channels that are rotated together ({recipe})")
    if op == "multiply" or (op == "cat" and attrs["dim"] != dim):
        return Recipe(op, tuple(map(cut, args)), attrs)
    if op in ("hadamard", "scale", "cast") or (op == "pad" and attrs["dim"] != dim):
        return Recipe(op, (cut(args[0]), *args[1:]), attrs)
    if op == "smooth":  # the exponents [K] belong to one dimension; -1: also for several layers [L, K]
        whole = attrs["dim"] != dim
        exponents = args[1] if whole else slice_(args[1], -1, share.rank, share.world, share.multiple)
        return Recipe(op, (cut(args[0]), exponents), attrs)
    if op == "dequantize":  # values [N, K], scales [N, 1]; of experts [E, N, K], whose dimensions count from the last
        return Recipe(op, (cut(args[0]), cut(args[1]) if dim in (0, -2) else args[1]), attrs)
    return slice_(recipe, dim, share.rank, share.world, share.multiple)
