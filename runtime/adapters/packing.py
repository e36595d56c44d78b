"""One adapter's tensors into its slot's layout, alike layers together: some hundred large operations instead of ten
thousand small ones.

The thread that launches steps shares the interpreter with those that pack, so what counts is how rarely packing asks
for it.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...compiler.graph.materialize import materialize
from ...compiler.graph.recipe import Recipe

ELEMENTS_AT_ONCE = 1 << 21  # 8 MiB in fp32: copies made on the way stay within the processor's caches
PACKING_THREADS = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Bundle:
    """Recipes that read the same tensors, such as the values and the scales of one stack."""

    def __init__(self, sources: frozenset[str]) -> None:
        self.places: list[int] = []
        self.recipes: list[Recipe] = []
        self.names = {_NUMBER.sub("#", name): name for name in sources}
        self.alone = len(self.names) != len(sources)  # it reads two layers

    def add(self, place: int, recipe: Recipe) -> None:
        """One more, for the stack at `place`."""
        self.places.append(place)
        self.recipes.append(recipe)
        self.alone |= _has_zeros(recipe)  # these have one slot

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for bundles that differ in their layer only."""
        return (self.places[0] if self.alone else None, *(_NUMBER.sub("#", str(recipe)) for recipe in self.recipes))


class Packing:
    """How an adapter becomes its slot of every stack.

    `recipes`: by stack, in the stacks' order; `shapes`: of one slot of each.
    """

    def __init__(self, recipes: Mapping[str, Recipe], shapes: Sequence[tuple[int, ...]]) -> None:
        bundles: dict[frozenset[str], Bundle] = {}
        for place, recipe in enumerate(recipes.values()):
            sources = recipe.sources()
            bundles.setdefault(sources, Bundle(sources)).add(place, recipe)
        alike: dict[tuple[Any, ...], list[Bundle]] = {}
        for bundle in bundles.values():
            alike.setdefault((bundle.form, *(shapes[place] for place in bundle.places)), []).append(bundle)
        self._groups = [group for bundles in alike.values() for group in _cut(bundles, shapes)]

    def pack(self, lookup: Callable[[str], torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Fill `targets`, one slot of each stack, from the adapter's tensors:

        `lookup("model.layers.0.self_attn.q_proj.lora_a")`.
        """
        for group in self._groups:
            first = group[0]
            find = partial(_stacked, lookup, None if first.alone else [bundle.names for bundle in group])
            memo: dict[Recipe, Any] = {}  # values and scales share their work
            for index, recipe in enumerate(first.recipes):
                slots = materialize(recipe, find, memo)
                for bundle, slot in zip(group, slots, strict=True):
                    targets[bundle.places[index]].copy_(slot)


def use_few_threads() -> None:
    """For the calling thread, which packs while steps run: torch's operations use at most half of the processor's
    cores and PACKING_THREADS.

    torch gives threads to come the number that was set last; a thread that ends at once sets the usual one.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(max(1, min(PACKING_THREADS, usual // 2)))
    restore = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restore.start()
    restore.join()


def _stacked(
    lookup: Callable[[str], torch.Tensor], layers: Sequence[Mapping[str, str]] | None, name: str
) -> torch.Tensor:
    """[layers, ...]: what is called `name` in the first layer."""
    if layers is None:
        return lookup(name).unsqueeze(0)
    return torch.stack([lookup(names[_NUMBER.sub("#", name)]) for names in layers])


def _cut(bundles: list[Bundle], shapes: Sequence[tuple[int, ...]]) -> Iterator[list[Bundle]]:
    """Pieces of ELEMENTS_AT_ONCE, or of one bundle."""
    size = max(torch.Size(shapes[place]).numel() for place in bundles[0].places)
    count = 1 if bundles[0].alone else max(1, ELEMENTS_AT_ONCE // max(1, size))
    return (bundles[first : first + count] for first in range(0, len(bundles), count))


def _has_zeros(recipe: Recipe) -> bool:
    return recipe.op == "zeros" or any(map(_has_zeros, recipe.args))
