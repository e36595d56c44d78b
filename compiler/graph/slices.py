"""One rank's part of a weight, as a recipe that reads no more of the checkpoint than this part."""

from dataclasses import dataclass

from .recipe import Recipe, share_of, slice_


class SliceError(ValueError):
    """A recipe can't be cut where it was asked for."""


@dataclass(frozen=True)
class Share:
    """Part `rank` of `world` parts, whose sizes are rounded up to a multiple of `multiple`."""

    rank: int
    world: int
    multiple: int = 1

    def of(self, size: int) -> int:
        """The size of this part, and of every other."""
        return share_of(size, self.world, self.multiple)

    def divides(self, size: int) -> bool:
        """Whether no part has to be filled up."""
        return self.of(size) * self.world == size


def sliced(recipe: Recipe, dim: int, share: Share, size: int) -> Recipe:
    """A share of a recipe's tensor along `dim`, which has `size`: cut before anything is computed, where that gives the
    same.

    Raises SliceError where columns that are rotated together would be cut apart.
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
    if op == "smooth":  # the exponents [K] go with one dimension; -1: of several layers [L, K]
        whole = attrs["dim"] != dim
        exponents = args[1] if whole else slice_(args[1], -1, share.rank, share.world, share.multiple)
        return Recipe(op, (cut(args[0]), exponents), attrs)
    if op == "dequantize":  # values [N, K], scales [N, 1]
        return Recipe(op, (cut(args[0]), cut(args[1]) if dim == 0 else args[1]), attrs)
    return slice_(recipe, dim, share.rank, share.world, share.multiple)
