"""Offsets of temporaries in the arena.

Two buffers may share bytes only if every access to one happens before the other's first write. With two streams, a
later position in the list does not mean a later time, so a free list is not safe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .buffers import Buffer
from .lower import Draft
from .program import Program, Step
from .schedule import MAIN, SIDE, clocks

ALIGNMENT = 256
NEVER = -1


def accesses(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return buffer -> indices of the steps that read or write it, in order."""
    result: dict[str, list[int]] = {}
    for step in steps:
        for name in dict.fromkeys(view.buffer for view in (*step.inputs(), *step.outs)):
            result.setdefault(name, []).append(step.index)
    return result


def plan_memory(buffers: Mapping[str, Buffer], steps: Sequence[Step]) -> tuple[tuple[Buffer, ...], int]:
    """Return buffers with offsets (multiples of 256) and lives, and the arena's size in bytes.

    Buffers are placed in order of size, the largest first, each at the lowest offset without a conflict. Two buffers
    conflict unless all accesses of one happen before those of the other.
    """
    used = accesses(steps)
    placed = {
        name: replace(
            buffer,
            life=(used[name][0], used[name][-1]) if name in used else (NEVER, NEVER),
            offset=0 if buffer.kind == "temp" else None,
        )
        for name, buffer in buffers.items()
    }
    temps = [buffer for buffer in placed.values() if buffer.kind == "temp" and buffer.nbytes]
    temps.sort(key=lambda buffer: (-buffer.nbytes, buffer.life[0], buffer.name))
    conflicts = _conflicts([used[buffer.name] for buffer in temps], steps)
    offsets = np.zeros(len(temps), dtype=np.int64)
    sizes = np.array([_aligned(buffer.nbytes) for buffer in temps], dtype=np.int64)
    for index, buffer in enumerate(temps):
        neighbours = np.flatnonzero(conflicts[index, :index])
        offset = 0
        for neighbour in neighbours[np.argsort(offsets[neighbours], kind="stable")]:
            if offset + sizes[index] <= offsets[neighbour]:
                break
            offset = max(offset, int(offsets[neighbour] + sizes[neighbour]))
        offsets[index] = offset
        placed[buffer.name] = replace(buffer, offset=offset)
    return tuple(placed.values()), int((offsets + sizes).max()) if temps else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _conflicts(used: Sequence[Sequence[int]], steps: Sequence[Step]) -> np.ndarray:
    """Return [i, j]: whether buffers i and j may be alive at once. A buffer's first access produces it."""
    if not used:
        return np.zeros((0, 0), dtype=bool)
    timing = clocks(steps)
    last = np.full((2, len(used)), NEVER)
    for index, touching in enumerate(used):
        for step in touching:
            lane = timing.lane[step]
            last[lane, index] = max(last[lane, index], timing.position[step])
    over = np.array([timing.finished[touching[0]] for touching in used])
    # earlier[i, j]: all accesses of i are over when j's producer starts
    earlier = (last[MAIN][:, None] < over[:, MAIN][None, :]) & (last[SIDE][:, None] < over[:, SIDE][None, :])
    return ~(earlier | earlier.T)


def unshared_bytes(program: Program | Draft) -> int:
    """Return the bytes of all temporaries without sharing."""
    buffers = program.buffers if isinstance(program, Program) else program.buffers.values()
    return sum(_aligned(buffer.nbytes) for buffer in buffers if buffer.kind == "temp")
