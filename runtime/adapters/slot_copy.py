"""One adapter's way from host memory into its slot of every stack: a few large copies and a few launches, instead of a
copy for each of a thousand tensors.

A slot is scattered over the stacks, one piece in each. The bytes therefore cross the bus as they lie in host memory,
into a buffer on the device, and are dealt out from there at the device's own bandwidth. An asynchronous copy costs its
thread some microseconds: for so many tensors that was longer than the bus takes.
"""

from collections.abc import Sequence

import torch

from .host_store import PIECE, Block, block_starts

WIDE = 8  # bytes that are dealt out at a time where every tensor allows it


class SlotCopies:
    """Copies of blocks into slots. `slots[s]`: the tensors of slot s on the device, in a block's order."""

    def __init__(self, slots: Sequence[list[torch.Tensor]], device: torch.device) -> None:
        self._plain = slots
        self._staging: torch.Tensor | None = None
        if device.type != "cuda" or not slots:
            return
        sizes = [tensor.nbytes for tensor in slots[0]]
        starts = block_starts(sizes)
        self._staging = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        wide = not any(size % WIDE for size in sizes) and not any(
            tensor.data_ptr() % WIDE for slot in slots for tensor in slot
        )
        dtype = torch.int64 if wide else torch.uint8
        self._sources = [
            self._staging[first : first + size].view(dtype) for first, size in zip(starts, sizes, strict=False)
        ]
        self._targets = [[tensor.view(-1).view(torch.uint8).view(dtype) for tensor in slot] for slot in slots]

    def enqueue(self, slot: int, block: Block) -> None:
        """Fill a slot in the order of the current stream; returns at once for a page-locked block.

        One copy at a time: they share the buffer.
        """
        if self._staging is None:
            torch._foreach_copy_(self._plain[slot], block.tensors)
            return
        for source, target in zip(block.memory.split(PIECE), self._staging.split(PIECE), strict=True):
            target.copy_(source, non_blocking=True)
        torch._foreach_copy_(self._targets[slot], self._sources)
