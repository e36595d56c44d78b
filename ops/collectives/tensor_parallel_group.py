"""Groups of ranks that share one model: an op names its group, and each process registers its membership.

A group's name includes its size (`tp2`), so a process without peers can compute shapes and costs of a program.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

_NAME = re.compile(r"tp([1-9][0-9]{0,3})")


class GroupError(RuntimeError):
    """An op names a group that this process does not belong to."""


@dataclass(eq=False)
class RankGroup:
    """This process's membership in a group of ranks that run the same programs with the same plans.

    name       the group's name in ops, see `tensor_parallel_group`
    rank       this process's tensor-parallel rank, 0 .. world - 1
    world      number of ranks
    processes  the ranks' process group of torch.distributed; None for a group of one
    buffers    memory that all ranks can read, by purpose; kernels allocate it when they first run
    """

    name: str
    rank: int
    world: int
    processes: Any = None
    buffers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world != world_of(self.name) or not 0 <= self.rank < self.world:
            raise GroupError(f"rank {self.rank} of {self.world} is not valid in the group {self.name!r}")

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, of this shape and dtype, in rank order. Waits for all ranks."""
        if self.world == 1:
            return [part]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.world)]
        distributed.all_gather(parts, part.contiguous(), group=self.processes)
        return parts


_GROUPS: dict[str, RankGroup] = {}


def tensor_parallel_group(world: int) -> str:
    """Return the name of the group of `world` ranks that share a model."""
    return f"tp{world}"


def world_of(name: str) -> int:
    """Return the number of ranks of the group of this name. Raises GroupError for an invalid name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise GroupError(f"{name!r} is not a group's name; use tp1, tp2, tp4, ...")
    return int(found[1])


def register_group(group: RankGroup) -> None:
    """Register `group` for ops, replacing a group of the same name."""
    _GROUPS[group.name] = group


def forget_group(name: str) -> None:
    """Unregister the group of this name."""
    _GROUPS.pop(name, None)


def rank_in(name: str) -> int:
    """Return this process's rank in the registered group of this name, 0 if it belongs to none."""
    return _GROUPS[name].rank if name in _GROUPS else 0


def group_named(name: str) -> RankGroup:
    """Return the registered group. Raises GroupError if this process does not belong to it."""
    if name not in _GROUPS:
        raise GroupError(
            f"this process belongs to no group {name!r}; start every rank with its own process and call "
            "register_group(RankGroup(...)) there before a step runs"
        )
    return _GROUPS[name]
