"""Pack an adapter's tensors into the layout of its slot, on the GPU or on several threads.

Equal layers are packed together, in large operations that release the GIL. The thread that launches steps needs the
GIL, so packing must acquire it rarely and briefly.
"""

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from typing import Any

import torch

from ...compiler.graph.materialize import materialize
from ...compiler.graph.recipe import Recipe

GROUP_ELEMENTS = 1 << 21  # 8 MiB in fp32: with smaller groups a step waits more often for the interpreter lock
GPU_GROUP_ELEMENTS = 1 << 22  # steps wait for a kernel of this size for some ten microseconds
PACKING_THREADS = 3  # each further one delays steps, too
OPERATION_THREADS = 8
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h: the largest values that glibc chooses itself. With smaller ones
# each group's copies go back to the operating system, and a third of the time is page faults.
_MALLOC_OPTIONS = ((-3, 1 << 25), (-1, 1 << 26))
_setting_threads = threading.Lock()
_log = logging.getLogger("sidestream")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class Bundle:
    """Recipes with the same source tensors, such as the values and the scales of one stack."""

    def __init__(self, sources: frozenset[str]) -> None:
        self.stacks: list[int] = []  # indices
        self.recipes: list[Recipe] = []
        self.names = {_LAYER.sub("#", name): name for name in sources}
        self.separate = len(self.names) != len(sources)  # its sources are of two layers

    def add(self, stack: int, recipe: Recipe) -> None:
        """Add the recipe of a stack."""
        self.stacks.append(stack)
        self.recipes.append(recipe)
        self.separate |= _has_zeros(recipe)  # zeros have the shape of one slot

    @property
    def form(self) -> tuple[Any, ...]:
        """Key that is equal for bundles that differ only in their layer."""
        return (self.stacks[0] if self.separate else None, *(_LAYER.sub("#", str(recipe)) for recipe in self.recipes))


class Packer:
    """Packs adapters. `recipes`: by stack, in the stacks' order; `shapes`: of one slot of each stack.

    elements  of each stack in the operations of equal layers
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], shapes: Sequence[tuple[int, ...]], elements: int = GROUP_ELEMENTS
    ) -> None:
        bundles: dict[frozenset[str], Bundle] = {}
        for stack, recipe in enumerate(recipes.values()):
            sources = recipe.sources()
            bundles.setdefault(sources, Bundle(sources)).add(stack, recipe)
        by_form: dict[tuple[Any, ...], list[Bundle]] = {}
        for bundle in bundles.values():
            by_form.setdefault((bundle.form, *(shapes[stack] for stack in bundle.stacks)), []).append(bundle)
        self._groups = [group for equal in by_form.values() for group in _split(equal, shapes, elements)]

    def pack(self, lookup: Callable[[Sequence[str]], torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Fill `targets`, one slot of each stack. `lookup` returns the adapter's tensors of a module and side in some
        layers as one [layers, ...].
        """

        def fill(stacks: Sequence[int], slots: torch.Tensor) -> None:
            for stack, slot in zip(stacks, slots, strict=True):
                targets[stack].copy_(slot)

        jobs = [_packing_pool().submit(_pack_group, group, lookup, fill) for group in self._groups]
        wait(jobs)  # also after an error: the caller may then fill `targets` again
        for job in jobs:
            job.result()

    def pack_on_gpu(
        self,
        lookup: Callable[[torch.device, Sequence[str]], torch.Tensor],
        fill: Callable[[Sequence[int], torch.Tensor], None],
        stream: torch.cuda.Stream,
        device_calls: AbstractContextManager[Any],
    ) -> None:
        """Compute slots by operations on `stream`, launched within `device_calls`; `fill` copies [layers, ...] to the
        slots of stacks, given their indices.

        The lookup's first argument is the device of the result. What does not fit into the GPU's memory is packed on
        the CPU.
        """
        for group in self._groups:
            try:
                with device_calls, torch.cuda.stream(stream):
                    _pack_group(group, partial(lookup, stream.device), fill)
            except torch.cuda.OutOfMemoryError as error:
                _log.debug("adapters are packed on the CPU: %s", error)
                _pack_group(group, partial(lookup, torch.device("cpu")), fill)
        stream.synchronize()


def _pack_group(
    group: Sequence[Bundle],
    lookup: Callable[[Sequence[str]], torch.Tensor],
    fill: Callable[[Sequence[int], torch.Tensor], None],
) -> None:
    first = group[0]

    def find(name: str) -> torch.Tensor:
        form = _LAYER.sub("#", name)
        return lookup([name] if first.separate else [bundle.names[form] for bundle in group])

    memo: dict[Recipe, Any] = {}  # shared by values and scales
    for index, recipe in enumerate(first.recipes):
        fill([bundle.stacks[index] for bundle in group], materialize(recipe, find, memo))


@cache
def _packing_pool() -> ThreadPoolExecutor:
    """Return the threads, each with one thread of torch: threads of one operation would wait for each other."""
    with suppress(AttributeError):  # glibc only
        for option, nbytes in _MALLOC_OPTIONS:
            ctypes.CDLL(None).mallopt(option, nbytes)
    # an update's content hash is computed at the same time, and steps need cores too
    count = max(1, min(PACKING_THREADS, len(os.sched_getaffinity(0)) * 3 // 8))
    return ThreadPoolExecutor(count, "adapter-packing", limit_torch_threads, (1,))


def limit_torch_threads(most: int = OPERATION_THREADS) -> None:
    """Limit torch to `most` threads and half of the CPU's cores for operations of the calling thread.

    New threads inherit the number that was set last, so a short-lived thread restores it.
    """
    with _setting_threads:
        default = torch.get_num_threads()
        torch.set_num_threads(max(1, min(most, default // 2)))
        restore = threading.Thread(target=torch.set_num_threads, args=(default,))
        restore.start()
        restore.join()


def _split(bundles: list[Bundle], shapes: Sequence[tuple[int, ...]], elements: int) -> Iterator[list[Bundle]]:
    """Split into groups of so many elements of a stack, or of one bundle."""
    size = max(torch.Size(shapes[stack]).numel() for stack in bundles[0].stacks)
    count = 1 if bundles[0].separate else max(1, elements // max(1, size))
    return (bundles[first : first + count] for first in range(0, len(bundles), count))


def _has_zeros(recipe: Recipe) -> bool:
    return recipe.op == "zeros" or any(map(_has_zeros, recipe.args))
