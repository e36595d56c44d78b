"""A model that sleeps: its device memory goes to others and comes back at the same addresses, so that programs and CUDA
graphs stay as they are.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

import torch

from ..api.errors import RequestError
from .capacity import Specs
from .regions import Region
from .weights import Source

TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)


class Sleeps(Protocol):
    """A model that can sleep, in one process or on several ranks; see `Sleeper`."""

    @property
    def asleep(self) -> frozenset[str]:
        """What is away now."""

    def sleep(self, level: int) -> None:
        """Give the memory back."""

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Take memory again."""


def check_level(level: int) -> None:
    """Raises RequestError for what is no level of sleep."""
    if isinstance(level, bool) or level not in LEVELS:
        raise RequestError(
            f"level={level!r} must be 1, which keeps the weights in host memory, or 2, which reads them again at "
            "wake_up"
        )


def tags_of(tags: Iterable[str] | None) -> tuple[str, ...]:
    """What `tags` names (None: all). Raises RequestError for an unknown one."""
    wanted = TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
    unknown = next((tag for tag in wanted if tag not in TAGS), None)
    if unknown is not None:
        raise RequestError(f"tags names {unknown!r}; choose from {' and '.join(map(repr, TAGS))}")
    return wanted


class Sleeper:
    """Makes weights, adapter stacks and KV cache, puts them away and brings them back.

    asleep   what is away now: of TAGS; the stacks go with the weights
    """

    def __init__(self, device: torch.device) -> None:
        self.asleep: frozenset[str] = frozenset()
        self._device = device
        self._level = 0

    def read_weights(self, specs: Specs, source: Source) -> dict[str, torch.Tensor]:
        """The weights by name."""
        self._source, self._weights = source, Region(specs, self._device)
        source.read(self._weights.tensors)
        self._trim()
        return dict(self._weights.tensors)

    def make_stacks(self, specs: Specs) -> dict[str, torch.Tensor]:
        """Adapter stacks of zeros, which come back as zeros."""
        self._stacks = Region(specs, self._device)
        return dict(self._stacks.tensors)

    def make_cache(self, specs: Specs) -> dict[str, torch.Tensor]:
        """KV caches of zeros, which come back as zeros."""
        self._cache = Region(specs, self._device)
        return dict(self._cache.tensors)

    def sleep(self, level: int) -> None:
        """Level 1 keeps the weights in host memory, level 2 nowhere; one that sleeps already stays as it is. No step
        and no copy may be under way.

        Raises RequestError for another level, and MemoryError, having changed nothing, where host memory is short.
        """
        check_level(level)
        if self.asleep:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._level = level
        if self._weights_leave:
            self._weights.release(keep=level == 1)
        self._stacks.release(keep=False)
        self._cache.release(keep=False)
        self.asleep = frozenset(TAGS)
        self._trim()

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Bring back what the tags name (None: all).

        Raises RequestError for an unknown tag, CapacityError where the device has too little memory left, and
        CheckpointError or OSError where weights that are to be read again are not there; what was not brought back
        sleeps on, and may be tried again.
        """
        wanted = tags_of(tags)
        for tag, wake in zip(TAGS, (self._wake_weights, self._cache.restore), strict=True):
            if tag in wanted and tag in self.asleep:
                wake()
                self.asleep -= {tag}

    @property
    def _weights_leave(self) -> bool:
        """On a CPU they are in host memory anyway."""
        return self._level == 2 or self._device.type == "cuda"

    def _wake_weights(self) -> None:
        with ExitStack() as undo:
            self._stacks.restore()
            undo.callback(self._stacks.release, keep=False)
            if self._weights_leave:
                self._weights.restore()
            if self._level == 2:
                undo.callback(self._weights.release, keep=False)
                self._source.read(self._weights.tensors)
                self._trim()
            undo.pop_all()

    def _trim(self) -> None:
        """Memory that torch's allocator holds for later goes back too."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
