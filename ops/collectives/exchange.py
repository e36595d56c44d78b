"""Memory of each rank that all ranks of a group read and write over NVLink, from inside their kernels.

All ranks have the same layout (offsets in bytes):

    0              number of issued tickets, int64: gives the row and epoch of the next program
    READY          int64 [rows][world]: the last epoch in which a rank's part of a row was readable
    done           int64 [rows]: the last epoch in which a row's owner had published its result
    slots          2 x slot_bytes: rows that the others read; epochs alternate between the two
    placed         3 x slot_bytes: parts that their producers write here directly

An epoch is one launch of a collective; its number is the same on all ranks, because they run the same programs in the
same order.

Two slots suffice without a barrier: a rank overwrites a slot of epoch e in epoch e + 2 (or a producer's slot after the
next collective). By then its kernel of epoch e + 1 has ended, after it received every peer's part of that epoch,
directly or through a row's owner. A peer signals that part only after its own kernel of epoch e has ended and read all
its inputs.

No launch deadlocks, for any number of programs that fit on a GPU: programs get rows in the order in which they start
(by a ticket), not by their index. Let i be the smallest unfinished row of all ranks. Each rank has finished the rows
before it, so the program of row i runs or is the next to start. It signals its part before any wait. So all waits for
row i end, its owner finishes, and then the others. No program waits for another row of its own rank.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ..core.cuda_driver import HANDLE_BYTES
from ..core.ipc_memory import ExportedMemory, MappedMemory
from ..core.triton_support import cdiv
from ..elementwise.quantize import row_block
from .tensor_parallel_group import GroupError, RankGroup, group_named, rank_in, world_of

PURPOSE = "exchange"  # key in RankGroup.buffers
SLOT_BYTES = 16 << 20  # 1,024 rows of 8,192 columns in 16 bits; longer prompts are split
MOST_ROWS = 2048  # per launch
PLACES = 3  # number of slots into which producers write parts directly
# Maximum bytes that one-shot reads from peers. Two H200 needed 10.1 us for 1 MiB and 13.5 for 2 (two-shot: 12.3 and
# 15.0); for 4 MiB two-shot was faster, 21.6 us against 23.4 (measurements/all_reduce_h200.txt).
ONE_SHOT_BYTES = 2 << 20
READY = 128  # offset of the first epoch: tickets have their own cache line
EPOCH = 8  # bytes
LAST_EPOCH = 0x7F  # each byte of an epoch that no launch reaches
_log = logging.getLogger(__name__)


def done_at(world: int) -> int:
    """Return the offset of the owners' epochs."""
    return READY + MOST_ROWS * world * EPOCH


def slots_at(world: int) -> int:
    """Return the offset of the slots."""
    return cdiv(done_at(world) + MOST_ROWS * EPOCH, 256) * 256


def exchange_bytes(world: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the bytes of a rank's memory."""
    return slots_at(world) + (2 + PLACES) * slot_bytes


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's view of the memory.

    rank        this process's tensor-parallel rank
    memories    uint8 [exchange_bytes] of each rank, in rank order, all readable and writable here
    slot_bytes  bytes of a slot, a multiple of 256
    own         owner of this rank's memory; None if others own the memories
    mapped      the peers' memories
    last        page-locked flags of an epoch that no launch reaches, and a stream to copy them
    """

    rank: int
    memories: tuple[torch.Tensor, ...]
    slot_bytes: int = SLOT_BYTES
    own: Optional[ExportedMemory] = None
    mapped: tuple[MappedMemory, ...] = ()
    last: tuple[Any, ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.memories)

    @property
    def memory(self) -> torch.Tensor:
        """This rank's memory."""
        return self.memories[self.rank]

    def places(self) -> tuple[torch.Tensor, ...]:
        """Return the uint8 [slot_bytes] slots for producers; consecutive collectives must use different ones."""
        start = slots_at(self.world) + 2 * self.slot_bytes
        return tuple(self.memory[start + place * self.slot_bytes :][: self.slot_bytes] for place in range(PLACES))

    def offset_of(self, tensor: torch.Tensor) -> Optional[int]:
        """Return the offset of a tensor within this rank's memory, or None if it is elsewhere."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset if 0 < offset < self.memory.numel() else None

    def launches(self, op: str, partial: torch.Tensor, placed: bool) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Yield (rows, kernel arguments) for each launch of a collective over partial [..., H].

        If a slot is too small for all rows, they are split in multiples of the world size, so that row % world is a
        row's owner in every launch. `placed`: peers may read partial in place if it is in this memory. Raises
        ValueError for rows that are too long for a program or a slot.
        """
        width, row_bytes = partial.shape[-1], partial.shape[-1] * partial.element_size()
        block, warps = row_block(width)
        if width > block or row_bytes % 16:
            raise ValueError(
                f"{op}: rows of {width} columns are not supported; at most {block}, in multiples of 16 bytes"
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
    """Allocate this rank's memory on a CUDA device, map the peers', and keep both in `group.buffers`.

    All ranks must call it together, before a step is captured. Raises GroupError on all ranks, and keeps nothing, if
    one of them can't map a peer's memory.
    """
    nbytes, mapped = exchange_bytes(group.world, slot_bytes), dict[int, MappedMemory]()
    own: Optional[ExportedMemory] = None
    failure: Optional[Exception] = None
    last: tuple[Any, ...] = ()
    try:
        # now: page-locking memory waits for kernels, also for those that wait for a peer
        flags = torch.full((slots_at(group.world) - READY,), LAST_EPOCH, dtype=torch.uint8)
        last = flags.pin_memory(), torch.cuda.Stream(device)
        own = ExportedMemory(nbytes, device)  # counters are zero before any signal: the next line waits for all ranks
    except (RuntimeError, OSError) as error:
        failure = error
    handles = group.gather(torch.frombuffer(bytearray(own.handle if own else HANDLE_BYTES), dtype=torch.uint8))
    try:
        for rank, handle in enumerate(handles if own is not None else ()):
            if rank != group.rank:
                mapped[rank] = MappedMemory(handle.numpy().tobytes(), nbytes, device)
    except (RuntimeError, ValueError) as error:
        failure = error
    failed = [rank for rank, each in enumerate(group.gather(torch.tensor([int(failure is not None)]))) if each]
    if own is not None and not failed:
        memories = tuple(own.tensor if rank == group.rank else mapped[rank].tensor for rank in range(group.world))
        exchange = Exchange(group.rank, memories, slot_bytes, own, tuple(mapped.values()), last)
        group.buffers[PURPOSE] = exchange
        return exchange
    for each in mapped.values():
        each.close()
    group.gather(torch.tensor([0]))  # no rank has a mapping any more
    if own is not None:
        own.free()
    raise GroupError(
        f"rank {group.rank} of {group.world} on {device} can't share memory with its peers: "
        f"{failure or f'rank {failed[0]} failed'}. The GPUs must reach each other over NVLink (`nvidia-smi topo -m`), "
        "and containers need one IPC namespace (--ipc=host)"
    ) from failure


def end_waits(group: RankGroup) -> None:
    """End all waits of this rank's kernels for peers that have died or are about to end; their results are wrong."""
    exchange = group.buffers.get(PURPOSE)
    if exchange is None or exchange.own is None:
        return
    flags, stream = exchange.last
    with _device_faults_logged(), torch.cuda.stream(stream):  # by a copy: waiting kernels may use all SMs
        exchange.memory[READY : slots_at(exchange.world)].copy_(flags, non_blocking=True)


def unmap_peers(group: RankGroup) -> None:
    """Unmap the peers' memories, before the peers end. Ends the waits of kernels."""
    end_waits(group)
    exchange = group.buffers.get(PURPOSE)
    if exchange is not None:
        with _device_faults_logged():
            for each in exchange.mapped:
                each.close()


def free_exchange(group: RankGroup) -> None:
    """Free this rank's memory; the peers have unmapped it or have ended."""
    unmap_peers(group)
    exchange = group.buffers.pop(PURPOSE, None)
    if exchange is not None and exchange.own is not None:
        with _device_faults_logged():
            exchange.own.free()


@contextlib.contextmanager
def _device_faults_logged() -> Iterator[None]:
    """Log errors of the device: after one of them nothing can be freed before the process ends."""
    try:
        yield
    except RuntimeError as error:
        _log.warning("memory that ranks share could not be freed: %s", error)


def exchange_of(group: str, device: torch.device) -> Optional[Exchange]:
    """Return the exchange that `open_exchange` made for this group, or None.

    For meta tensors (compilation without a launch) return an exchange without memory, in any process: of this process's
    rank, or of rank 0 if it belongs to no such group.
    """
    if device.type == "meta":
        memory = torch.empty(exchange_bytes(world_of(group)), dtype=torch.uint8, device="meta")
        return Exchange(rank_in(group), (memory,) * world_of(group))
    return group_named(group).buffers.get(PURPOSE)


def is_one_shot(nbytes: int, world: int) -> bool:
    """Return whether one-shot is used for parts of `nbytes`: each rank reads all rows from all peers."""
    return (world - 1) * nbytes <= ONE_SHOT_BYTES


def bytes_from_peers(nbytes: int, gathered: int, world: int, one_shot: bool) -> int:
    """Return the bytes that a rank reads over NVLink, for parts of `nbytes` each.

    gathered  bytes of the owners' results of all rows
    """
    return (world - 1) * nbytes if one_shot else (world - 1) * (nbytes + gathered) // world
