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
