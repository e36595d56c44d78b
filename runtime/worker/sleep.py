"""Sleep mode: release a model's device memory and restore it at the same addresses, so that programs and CUDA graphs
stay valid.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Protocol

import torch

from ..api.errors import RequestError
from .memory_budget import Specs
from .sleep_memory import ReleasableTensors
from .weight_loader import ReadWeights

TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)


class SleepControl(Protocol):
    """See `Sleeper`; in one process or on several tensor-parallel ranks."""

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that is released."""

    def sleep(self, level: int) -> None:
        """Release the memory."""

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Restore memory."""


def check_level(level: int) -> None:
    """Raise RequestError unless `level` is 1 or 2."""
    if isinstance(level, bool) or level not in LEVELS:
        raise RequestError(
            f"level={level!r} must be 1, which keeps the weights in host memory, or 2, which reads them again at "
            "wake_up"
        )


def tags_of(tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return `tags` as a tuple (None: all). Raises RequestError for an unknown one."""
    wanted = TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
    unknown = next((tag for tag in wanted if tag not in TAGS), None)
    if unknown is not None:
        raise RequestError(f"tags names {unknown!r}; choose from {' and '.join(map(repr, TAGS))}")
    return wanted


class Sleeper:
    """Allocates weights, adapter stacks and KV cache; releases and restores their memory.

    asleep         the tags, of TAGS, whose memory is released; the stacks belong to the weights
    before_sleep   called before memory is released: no other thread may use it from then on
    """

    def __init__(self, device: torch.device) -> None:
        self.asleep: frozenset[str] = frozenset()
        self.before_sleep: Callable[[], None] = lambda: None
        self._device = device
        self._level = 0

    def read_weights(self, specs: Specs, read: ReadWeights) -> dict[str, torch.Tensor]:
        """Allocate and read the weights; return them by name."""
        self._read_weights, self._weights = read, ReleasableTensors(specs, self._device)
        read(self._weights.tensors)
        self._empty_cache()
        return dict(self._weights.tensors)

    def make_stacks(self, specs: Specs) -> dict[str, torch.Tensor]:
        """Return adapter stacks of zeros, which are zeros again after a sleep."""
        self._stacks = ReleasableTensors(specs, self._device)
        return dict(self._stacks.tensors)

    def make_cache(self, specs: Specs) -> dict[str, torch.Tensor]:
        """Return KV caches of zeros, which are zeros again after a sleep."""
        self._cache = ReleasableTensors(specs, self._device)
        return dict(self._cache.tensors)

    def sleep(self, level: int) -> None:
        """Release the memory. Level 1 copies the weights to host memory, level 2 discards them.

        Does nothing for a sleeping model. No step and no copy may be in flight.

        Raises RequestError for another level, and MemoryError, changing nothing, without enough host memory.
        """
        check_level(level)
        if self.asleep:
            return
        self.before_sleep()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._level = level
        if self._releases_weights:
            self._weights.release(keep=level == 1)
        self._stacks.release(keep=False)
        self._cache.release(keep=False)
        self.asleep = frozenset(TAGS)
        self._empty_cache()

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Restore the memory of the tags (None: all).

        Raises RequestError for an unknown tag, CapacityError without enough device memory, and CheckpointError or
        OSError if the weights cannot be read again. What was not restored stays asleep, and can be retried.
        """
        wanted = tags_of(tags)
        for tag, wake in zip(TAGS, (self._wake_weights, self._cache.restore), strict=True):
            if tag in wanted and tag in self.asleep:
                wake()
                self.asleep -= {tag}

    @property
    def _releases_weights(self) -> bool:
        """Return whether `sleep` releases the weights: on a CPU, level 1 keeps them in place."""
        return self._level == 2 or self._device.type == "cuda"

    def _wake_weights(self) -> None:
        with ExitStack() as undo:
            self._stacks.restore()
            undo.callback(self._stacks.release, keep=False)
            if self._releases_weights:
                self._weights.restore()
            if self._level == 2:
                undo.callback(self._weights.release, keep=False)
                self._read_weights(self._weights.tensors)
                self._empty_cache()
            undo.pop_all()

    def _empty_cache(self) -> None:
        """Release the cached memory of torch's allocator."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
