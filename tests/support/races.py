"""A checker of programs on two streams that shares no code with the scheduler and the memory plan that it checks."""

from collections.abc import Mapping, Sequence

from sidestream.compiler.program.buffers import View, views_in
from sidestream.compiler.program.calls import mutated_views
from sidestream.compiler.program.program import Program, Step


def find_races(program: Program, mutated: Mapping[int, Sequence[View]] | None = None) -> list[str]:
    """Everything that could go wrong when the steps run on two streams in any order that their waits allow; empty for a
    sound program.

    Which step reaches which is found by walking the edges. Reported: two steps in no order that touch the same bytes
    while one writes them; reads of temporaries that nothing has written; reads of bytes that another buffer's write has
    changed since. `mutated`: views that steps write besides their outs (default: from the ops' schemas).
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


def find_peer_races(program: Program, places: Mapping[str, int]) -> list[str]:
    """Writes to memory that the peers of a rank may still read; empty for sound places (buffer -> place).

    A collective's peers may read what it shows them until the next collective has ended. Looked at are two runs of the
    program, one after the other.
    """
    steps = program.steps
    reach = _ancestors(steps)
    collectives = [step for step in steps if step.op.startswith("sidestream.all_reduce")]

    def before(first: tuple[int, int], second: tuple[int, int]) -> bool:
        return first[0] < second[0] or (first[0] == second[0] and bool(reach[second[1]] >> first[1] & 1))

    times = [(run, step.index) for run in (0, 1) for step in collectives]
    problems = []
    for writer in steps:
        for place in {places[view.buffer] for view in (*writer.outs, *mutated_views(writer)) if view.buffer in places}:
            for now in ((0, writer.index), (1, writer.index)):
                for shown in times:
                    reads = {places.get(view.buffer) for view in steps[shown[1]].inputs()}
                    if place not in reads or before(now, shown):
                        continue
                    if not any(before(shown, ended) and before(ended, now) for ended in times):
                        problems.append(
                            f"{writer.name} writes place {place} in run {now[0]}, which peers may read for "
                            f"{steps[shown[1]].name} of run {shown[0]}"
                        )
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
