"""Where temporaries lie in the arena, and an independent check that no two steps get in each other's way.

Two buffers may share bytes only when every access to one happens before the other's first write. A free list per
program would not do: on two streams "later in the list" does not mean "later in time".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .buffers import Buffer, View, views_in
from .calls import mutated_views
from .lower import Draft
from .program import Program, Step
from .schedule import MAIN, SIDE, clocks

ALIGNMENT = 256
NEVER = -1


def accesses(steps: Sequence[Step]) -> dict[str, list[int]]:
    """buffer -> the steps that read or write it, in order."""
    result: dict[str, list[int]] = {}
    for step in steps:
        for name in dict.fromkeys(view.buffer for view in (*step.inputs(), *step.outs)):
            result.setdefault(name, []).append(step.index)
    return result


def plan_memory(buffers: Mapping[str, Buffer], steps: Sequence[Step]) -> tuple[tuple[Buffer, ...], int]:
    """Buffers with their offsets and lives, and the arena's size in bytes (offsets are multiples of 256).

    Largest first, each at the lowest offset that no conflicting buffer covers; buffers conflict unless one's accesses
    all happen before the other's.
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
    """[i, j] true when buffers i and j may be alive at once; a buffer's first access is its producer, which all
    others follow.
    """
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
    """What the temporaries would take without sharing."""
    buffers = program.buffers if isinstance(program, Program) else program.buffers.values()
    return sum(_aligned(buffer.nbytes) for buffer in buffers if buffer.kind == "temp")


def find_races(program: Program, mutated: Mapping[int, Sequence[View]] | None = None) -> list[str]:
    """Everything that could go wrong when the steps run on two streams in any order that their waits allow; empty for a
    sound program.

    Written without the scheduler's clocks: which step reaches which is found by walking the edges. Reported: two steps
    in no order that touch the same bytes while one writes them; reads of temporaries that nothing has written; reads
    behind which another buffer's write has landed. `mutated`: views that steps write besides their outs (default: from
    the ops' schemas).
    """
    steps, buffers = program.steps, program.by_name
    reach = _ancestors(steps)
    ranges = _byte_ranges(program)
    reads = [{view.buffer for view in step.inputs()} for step in steps]
    writes = [
        {
            view.buffer
            for view in (*step.outs, *(mutated_views(step) if mutated is None else mutated.get(step.index, ())))
        }
        for step in steps
    ]
    problems = []

    def overlap(first: str, second: str) -> bool:
        (space, begin, end), (other_space, other_begin, other_end) = ranges[first], ranges[second]
        return space == other_space and begin < other_end and other_begin < end

    def label(index: int) -> str:
        return f"step {index} {steps[index].name} ({steps[index].stream})"

    for later in range(len(steps)):
        for earlier in range(later):
            if reach[later] >> earlier & 1:
                continue
            pairs = [(a, b) for a in writes[earlier] for b in reads[later] | writes[later]] + [
                (a, b) for a in reads[earlier] for b in writes[later]
            ]
            for a, b in sorted(set(pairs)):
                if overlap(a, b):
                    where = f"{a} {ranges[a][1:]} and {b} {ranges[b][1:]}"
                    problems.append(
                        f"{label(earlier)} and {label(later)} are in no order, but {where} overlap and one writes"
                    )
    for index in range(len(steps)):
        for name in sorted(reads[index]):
            if buffers[name].kind not in ("temp", "output") or not buffers[name].nbytes:
                continue
            own = [step for step in range(index) if name in writes[step] and reach[index] >> step & 1]
            if not own:
                problems.append(f"{label(index)} reads {name}, which no step before it has written")
                continue
            for step in range(own[0] + 1, index):
                spoilers = [other for other in writes[step] if other != name and overlap(other, name)]
                if spoilers and reach[step] >> own[0] & 1 and reach[index] >> step & 1:
                    problems.append(
                        f"{label(index)} reads {name}, over which {label(step)} has written "
                        f"{', '.join(sorted(spoilers))}"
                    )
    written = set().union(*writes)
    for view in views_in(program.outputs):
        if (
            buffers[view.buffer].kind in ("temp", "output")
            and buffers[view.buffer].nbytes
            and view.buffer not in written
        ):
            problems.append(f"the output {view.buffer} is written by no step")
    return problems


def _ancestors(steps: Sequence[Step]) -> list[int]:
    """For each step a bit set of the steps that have finished before it starts."""
    edges: list[list[int]] = [list(step.waits) for step in steps]
    for index, step in enumerate(steps):
        same = [other for other in range(index) if steps[other].stream == step.stream]
        edges[index].extend(same[-1:])
    result: list[int] = []
    for sources in edges:
        bits = 0
        for source in sources:
            bits |= result[source] | 1 << source
        result.append(bits)
    return result


def _byte_ranges(program: Program) -> dict[str, tuple[str, int, int]]:
    """buffer -> (address space, first byte, end): the arena for temporaries, a space of its own for each other
    buffer.
    """
    result = {}
    for buffer in program.buffers:
        first = buffer.offset or 0
        result[buffer.name] = ("arena" if buffer.kind == "temp" else buffer.name, first, first + buffer.nbytes)
    return result
