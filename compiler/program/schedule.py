"""Two streams: which steps run at the same time, where one waits for the other, how many SMs each may take.

Each stream keeps the graph's order. A wait is placed only where neither that order nor an earlier wait implies it: a
step's clock counts how many steps of each stream have certainly finished before it starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...ops.core.device import H200_SMS
from ...ops.core.registry import NAMESPACE
from .lower import Operation
from .program import Step, Stream

MAIN, SIDE = 0, 1


@dataclass(frozen=True)
class Clocks:
    """Happens-before of a list of steps:

    `lane[i]` 0 = main, 1 = side; `position[i]` within the lane; `finished[i]` = steps of (main, side) that are over.
    """

    lane: tuple[int, ...]
    position: tuple[int, ...]
    finished: tuple[tuple[int, int], ...]

    def before(self, first: int, second: int) -> bool:
        """Whether step `first` has finished when step `second` starts."""
        return self.position[first] < self.finished[second][self.lane[first]]


def clocks(steps: Sequence[Step]) -> Clocks:
    """The clocks of scheduled steps, from their streams and waits."""
    lanes: list[int] = []
    positions: list[int] = []
    finished: list[tuple[int, int]] = []
    counts, state = [0, 0], [(0, 0), (0, 0)]
    for step in steps:
        lane = MAIN if step.stream == "main" else SIDE
        now = list(state[lane])
        now[lane] = counts[lane]
        for wait in step.waits:
            now = [
                max(now[other], finished[wait][other], (positions[wait] + 1) * (lanes[wait] == other))
                for other in (MAIN, SIDE)
            ]
        lanes.append(lane)
        positions.append(counts[lane])
        finished.append((now[0], now[1]))
        state[lane] = (now[0], now[1])
        counts[lane] += 1
    return Clocks(tuple(lanes), tuple(positions), tuple(finished))


def dependencies(operations: Sequence[Operation]) -> list[set[int]]:
    """For each operation the earlier ones that it must follow: writers of what it reads, readers and writers of what
    it writes.
    """
    writer: dict[str, int] = {}
    readers: dict[str, set[int]] = {}
    result: list[set[int]] = []
    for index, operation in enumerate(operations):
        needed = {writer[name] for name in operation.reads | operation.writes if name in writer}
        for name in operation.writes:
            needed |= readers.get(name, set())
        needed.discard(index)
        result.append(needed)
        for name in operation.reads:
            readers.setdefault(name, set()).add(index)
        for name in operation.writes:
            writer[name], readers[name] = index, set()
    return result


def emission_order(operations: Sequence[Operation], needed: Sequence[set[int]], two_streams: bool) -> list[int]:
    """Graph order, but each side step as soon as its inputs are there: the side stream then forks before the main
    one goes on.
    """
    if not two_streams:
        return list(range(len(operations)))
    side = [index for index, operation in enumerate(operations) if operation.side]
    order: list[int] = []
    done: set[int] = set()

    def advance() -> None:
        while side and needed[side[0]] <= done:
            done.add(side[0])
            order.append(side.pop(0))

    advance()
    for index, operation in enumerate(operations):
        if not operation.side:
            order.append(index)
            done.add(index)
            advance()
    return order


def schedule(
    operations: Sequence[Operation],
    *,
    two_streams: bool,
    sm_count: int = H200_SMS,
    side_share: float | None = None,
    pdl: bool = True,
) -> tuple[Step, ...]:
    """Ordered steps with minimal waits.

    two_streams  operations marked `side` get their own stream; otherwise everything runs on the main one
    sm_count     SMs of the GPU
    side_share   the share of them that side steps get (their own `sm_share`, else this), main steps meanwhile get the
                 rest. None: nobody is limited. That is the fastest for LoRA: its programs are small and many, and fit
                 among those of the base GEMMs, which lose more to fewer SMs
    pdl          programmatic dependent launch after a kernel of the same stream (not where the side stream forks:
                 measured a loss)
    """
    needed = dependencies(operations)
    order = emission_order(operations, needed, two_streams)
    place = {index: position for position, index in enumerate(order)}
    lanes = [SIDE if two_streams and operations[index].side else MAIN for index in order]
    positions, counts = [], [0, 0]
    for lane in lanes:
        positions.append(counts[lane])
        counts[lane] += 1
    waits: list[tuple[int, ...]] = []
    finished: list[tuple[int, int]] = []
    state = [(0, 0), (0, 0)]
    for position, index in enumerate(order):
        lane, other = lanes[position], 1 - lanes[position]
        last = max(
            (place[dependency] for dependency in needed[index] if lanes[place[dependency]] == other), default=None
        )
        now = list(state[lane])
        now[lane] = positions[position]
        if last is not None and positions[last] >= now[other]:
            waits.append((last,))
            now[other] = max(positions[last] + 1, finished[last][other])
            now[lane] = max(now[lane], finished[last][lane])
        else:
            waits.append(())
        finished.append((now[0], now[1]))
        state[lane] = (now[0], now[1])
    return _steps(
        [operations[index] for index in order],
        Clocks(tuple(lanes), tuple(positions), tuple(finished)),
        waits,
        sm_count,
        side_share,
        pdl,
    )


def _steps(
    operations: Sequence[Operation],
    timing: Clocks,
    waits: Sequence[tuple[int, ...]],
    sm_count: int,
    side_share: float | None,
    pdl: bool,
) -> tuple[Step, ...]:
    recorded = {wait for entry in waits for wait in entry}
    side = [position for position, lane in enumerate(timing.lane) if lane == SIDE]
    shares = {position: operations[position].sm_share or side_share for position in side}
    budgets = {
        position: max(1, min(sm_count - 1, round(share * sm_count)))
        for position, share in shares.items()
        if share is not None
    }
    previous: list[Operation | None] = [None, None]
    steps = []
    for position, operation in enumerate(operations):
        lane = timing.lane[position]
        stream: Stream = "main" if lane == MAIN else "side"
        own = is_kernel(operation)
        budget = budgets.get(position) if lane == SIDE else _main_budget(position, timing, side, budgets, sm_count)
        before = previous[lane]
        chained = (
            pdl and own and before is not None and is_kernel(before) and not (lane == SIDE and bool(waits[position]))
        )
        steps.append(
            Step(
                index=position,
                name=operation.name,
                op=operation.op,
                args=operation.args,
                outs=operation.outs,
                stream=stream,
                waits=waits[position],
                records=position in recorded,
                sm_budget=budget if own else None,
                pdl=chained,
                kwargs=operation.kwargs,
            )
        )
        previous[lane] = operation
    return tuple(steps)


def is_kernel(operation: Operation | Step) -> bool:
    """Whether this is one of Sidestream's own launches (ATen's know neither SM budgets nor PDL)."""
    return operation.op.startswith(f"{NAMESPACE}.")


def _main_budget(
    position: int, timing: Clocks, side: Sequence[int], budgets: dict[int, int], sm_count: int
) -> int | None:
    """What limited side steps leave to a main step that may run meanwhile; None when none may."""
    taken = 0
    for other in side[timing.finished[position][SIDE] :]:
        if timing.before(position, other):
            break
        taken = max(taken, budgets.get(other, 0))
    return sm_count - taken if taken else None
