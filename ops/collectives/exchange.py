"""Memory of each rank that all ranks of a group read and write, over NVLink, from inside their kernels.

Each rank has one piece of it, laid out alike (offsets in bytes):

    0              tickets taken so far, int64: which row a program takes, and in which epoch
    READY          int64 [rows][world]: the last epoch in which a rank's part of a row was there to be read
    done           int64 [rows]: the last epoch in which a row's owner had put its result there
    slots          2 x slot_bytes: rows that the others read; epochs use the two in turn
    placed         3 x slot_bytes: parts that their producers write straight here

An epoch is one launch of a collective; all ranks count alike, since they run the same programs in the same order.

Why two slots do and no barrier follows: a rank writes a slot of epoch e again in epoch e + 2 (or a producer's slot once
the next collective has ended). Then its kernel of epoch e + 1 has ended, which had heard of every peer's part of that
epoch, itself or through a row's owner, and a peer signals that only when its own kernel of epoch e has ended and read
all it wanted.

Why no launch waits for ever, however few programs fit on a GPU: programs take rows in the order in which they begin to
run (a ticket), not by their index. Of all unfinished rows of all ranks take the smallest, i. On each rank the rows
before it are finished, so no program there holds its place, and the program of row i runs or is the next to begin. It
signals its part before it waits for anything. So everybody who waits for a part of row i gets it, its owner finishes,
and then the others. Nor does a program ever wait for another row of its own rank.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ..core.triton_support import cdiv
from ..elementwise.quantize import row_block
from .group import GroupError, RankGroup, group_named, world_of

PURPOSE = "exchange"  # its place in RankGroup.buffers
SLOT_BYTES = 16 << 20  # 1,024 rows of 8,192 columns in 16 bits; longer prompts go in pieces
MOST_ROWS = 2048  # that one launch exchanges
PLACES = 3  # for parts that their producers write here
# What one-shot may bring in from the peers of a rank. On two H200 it took 10.1 us for 1 MiB and 13.5 for 2, where
# two-shot took 12.3 and 15.0; for 4 MiB two-shot was faster, 21.6 us against 23.4 (measurements/all_reduce_h200.txt).
ONE_SHOT_BYTES = 2 << 20
READY = 128  # tickets have a cache line of their own
EPOCH = 8  # bytes


def done_at(world: int) -> int:
    """Where the owners' epochs begin."""
    return READY + MOST_ROWS * world * EPOCH


def slots_at(world: int) -> int:
    """Where the slots begin."""
    return cdiv(done_at(world) + MOST_ROWS * EPOCH, 256) * 256


def exchange_bytes(world: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of a rank's memory."""
    return slots_at(world) + (2 + PLACES) * slot_bytes


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's view of the memory.

    rank        of `memories`, this process's own
    memories    uint8 [exchange_bytes] of each rank, in rank order, all readable and writable here
    slot_bytes  of a slot, a multiple of 256
    owners      what has to live as long as the memories, which are views that own nothing
    """

    rank: int
    memories: tuple[torch.Tensor, ...]
    slot_bytes: int = SLOT_BYTES
    owners: tuple[object, ...] = ()

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.memories)

    @property
    def memory(self) -> torch.Tensor:
        """This rank's own."""
        return self.memories[self.rank]

    def places(self) -> tuple[torch.Tensor, ...]:
        """uint8 [slot_bytes] each: where producers may write a part, if consecutive collectives of all programs use
        different ones.
        """
        start = slots_at(self.world) + 2 * self.slot_bytes
        return tuple(self.memory[start + place * self.slot_bytes :][: self.slot_bytes] for place in range(PLACES))

    def offset_of(self, tensor: torch.Tensor) -> Optional[int]:
        """The byte at which a tensor begins that lies in this rank's memory; None for one that lies elsewhere."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset if 0 < offset < self.memory.numel() else None

    def launches(self, op: str, partial: torch.Tensor, placed: bool) -> Iterator[tuple[slice, dict[str, Any]]]:
        """For each launch of a collective over partial [..., H] its rows and what its kernel is told of them.

        More rows than a slot holds go in pieces, of multiples of the world, so that row % world is a row's owner in
        every launch. `placed`: peers may read partial where it lies, if that is here.
        Raises ValueError for rows that no program holds, or no slot.
        """
        width, row_bytes = partial.shape[-1], partial.shape[-1] * partial.element_size()
        block, warps = row_block(width)
        if width > block or row_bytes % 16:
            raise ValueError(
                f"{op}: rows of {width} columns can't be exchanged; there may be {block} at most, in whole 16 bytes"
            )
        at_once = min(self.slot_bytes // row_bytes, MOST_ROWS) // self.world * self.world
        if not at_once:
            raise ValueError(
                f"{op}: {self.world} rows of {row_bytes} bytes do not fit {self.slot_bytes} bytes; open the exchange "
                "with more slot_bytes"
            )
        count = partial.numel() // width if width else 0
        at = self.offset_of(partial) if placed else None
        for start in range(0, count, at_once):
            rows = slice(start, min(start + at_once, count))
            yield (
                rows,
                {
                    "rows": rows.stop - rows.start,
                    "placed": 0 if at is None else at + start * row_bytes,
                    "slot_bytes": self.slot_bytes,
                    "RANK": self.rank,
                    "WORLD": self.world,
                    "PLACED": at is not None,
                    "DONE": done_at(self.world),
                    "SLOTS": slots_at(self.world),
                    "WIDTH": width,
                    "BLOCK": block,
                    "num_warps": warps,
                },
            )


def open_exchange(group: RankGroup, device: torch.device, slot_bytes: int = SLOT_BYTES) -> Exchange:
    """Allocate this rank's memory on a CUDA device, open the peers', and keep both in `group.buffers`. All ranks call
    it together, before a step is captured.

    Raises GroupError where a peer's memory can't be opened.
    """
    from torch.distributed import _symmetric_memory as symmetric

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = (
        "1"  # of the host's switches, which others share; no kernel uses it
    )
    try:
        memory = symmetric.empty(exchange_bytes(group.world, slot_bytes), dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)  # counters are zero before anybody can signal: all ranks meet in the next line
        handle = symmetric.rendezvous(memory, group.processes)
        memories = [handle.get_buffer(rank, memory.shape, torch.uint8) for rank in range(group.world)]
    except RuntimeError as error:
        raise GroupError(
            f"rank {group.rank} of {group.world} on {device} can't share memory with its peers: {error}. The GPUs must "
            "reach each other over NVLink (`nvidia-smi topo -m`), and containers need one IPC namespace (--ipc=host)"
        ) from error
    # where an allocation holds several tensors, ours begins at the same byte of it on all ranks
    shift = memory.data_ptr() - memories[group.rank].data_ptr()
    if shift:
        memories = [handle.get_buffer(rank, memory.shape, torch.uint8, shift) for rank in range(group.world)]
    exchange = Exchange(group.rank, tuple(memories), slot_bytes, (memory, handle))
    group.buffers[PURPOSE] = exchange
    return exchange


def exchange_of(group: str, device: torch.device) -> Optional[Exchange]:
    """What `open_exchange` made for the group of this name; None where nobody has called it.

    For meta tensors, with which a launch is compiled and not run, rank 0's without memory: any process can ask.
    """
    if device.type == "meta":
        memory = torch.empty(exchange_bytes(world_of(group)), dtype=torch.uint8, device="meta")
        return Exchange(0, (memory,) * world_of(group))
    return group_named(group).buffers.get(PURPOSE)


def is_one_shot(nbytes: int, world: int) -> bool:
    """Whether each rank reads all rows of all peers' parts, of `nbytes` each, rather than each row's owner alone."""
    return (world - 1) * nbytes <= ONE_SHOT_BYTES


def bytes_from_peers(nbytes: int, gathered: int, world: int, one_shot: bool) -> int:
    """What a rank reads over NVLink of parts of `nbytes` each; `gathered`: bytes of what owners make of all rows."""
    return (world - 1) * nbytes if one_shot else (world - 1) * (nbytes + gathered) // world
