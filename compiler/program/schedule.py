"""Schedule operations on two streams: order, waits, SM budgets.

Each stream keeps the graph's order. A wait is added only if order and earlier waits do not imply it. To decide this,
each step has a clock: the number of steps of each stream that have finished before it starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...ops.core.device import H200_SMS
from ...ops.core.registry import NAMESPACE
from .lower import Operation
from .program import Step, Stream

MAIN, SIDE = 0, 1
# ops whose results are read by later kernels before these wait: the next kernel starts when the op has finished
READ_EARLY = frozenset({f"{NAMESPACE}.prefix_plan"})


@dataclass(frozen=True)
class Clocks:
    """Happens-before of a list of steps.

    lane      0 = main, 1 = side
    position  index within the lane
    finished  number of (main, side) steps that have finished before the step starts
    """

    lane: tuple[int, ...]
    position: tuple[int, ...]
    finished: tuple[tuple[int, int], ...]

    def before(self, first: int, second: int) -> bool:
        """Return whether step `first` has finished when step `second` starts."""
        return self.position[first] < self.finished[second][self.lane[first]]


def clocks(steps: Sequence[Step]) -> Clocks:
    """Return the clocks of scheduled steps, from their streams and waits."""
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
    """Return for each operation the earlier ones on which it depends: reads after writes, writes after any access."""
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
    """Return the graph's order, with each side step as early as its inputs allow: the side stream then forks first."""
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
    """Return ordered steps with minimal waits.

    two_streams  operations marked `side` get their own stream
    sm_count     SMs of the GPU
    side_share   share of the SMs for side steps without an `sm_share` of their own; concurrent main steps get the rest.
                 None: no limits, which is fastest for LoRA: its many small CTAs fit next to those of the base GEMMs
    pdl          programmatic dependent launch after a kernel of the same stream (not at a fork, where it is slower, and
                 not after READ_EARLY)
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
        last = max((place[each] for each in needed[index] if lanes[place[each]] == other), default=None)
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
    limited = {position: share for position, share in shares.items() if share is not None}
    budgets = {position: max(1, min(sm_count - 1, round(share * sm_count))) for position, share in limited.items()}
    previous: list[Operation | None] = [None, None]
    steps = []
    for position, operation in enumerate(operations):
        lane = timing.lane[position]
        stream: Stream = "main" if lane == MAIN else "side"
        own = is_kernel(operation)
        budget = budgets.get(position) if lane == SIDE else _main_budget(position, timing, side, budgets, sm_count)
        before = previous[lane]
        forks = lane == SIDE and bool(waits[position])
        follows = before is not None and is_kernel(before) and before.op not in READ_EARLY
        chained = pdl and own and follows and not forks
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
    """Return whether this is a launch of Sidestream (ATen's launches have neither SM budgets nor PDL)."""
    return operation.op.startswith(f"{NAMESPACE}.")


def _main_budget(
    position: int, timing: Clocks, side: Sequence[int], budgets: dict[int, int], sm_count: int
) -> int | None:
    """Return the SMs that limited side steps at the same time leave to a main step; None without such side steps."""
    taken = 0
    for other in side[timing.finished[position][SIDE] :]:
        if timing.before(position, other):
            break
        taken = max(taken, budgets.get(other, 0))
    return sm_count - taken if taken else None
