"""Estimate the time of a program: each step's bytes and FLOPs at the GPU's ceilings, launch costs, and both lanes.

    seconds of a step = launch + latency of its kind of kernel + cbrt(moving^3 + computing^3)
    moving = bytes / reached bandwidth (or NVLink time, if longer),
    computing = FLOPs / reached rate

The longer of the two dominates; if they are equal the estimate is a quarter longer, since a kernel overlaps them only
partly (linears of 128 and 256 tokens, docs/measurements/tune_h200.txt). Concurrent steps of the two lanes share the
memory's bandwidth; a cuBLAS product needs whole SMs, so the other lane idles. docs/measurements compares estimates with
measurements: `estimated_changes.txt` with the ablation, `cost_check_h200.txt` with whole decode steps
(tools/dev/bench/cost_error.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cbrt, prod

from ..program.buffers import View
from ..program.program import Program, Step
from .bytes_and_flops import DEFAULT, Assumptions, Work, link_bytes, must_read, work
from .hardware import H200, Gpu
from .kernel_costs import FULL_ROWS, LINK_REACHED, Kind, busy_sms, extra_seconds, kind_of, takes_whole_sms

# sources: cost_check_h200.txt, and for changes estimated_changes.txt
KNOWN_ERROR = (
    "2% on average, 5% at most, over whole decode steps of Llama-3.1-8B's shape on an H200, 1 to 256 sequences; of 147 "
    "changes that were measured 138 are within 15% or 2 us a layer"
)


@dataclass(frozen=True)
class StepCost:
    """Cost of one step that runs alone.

    floor    seconds of its bytes and FLOPs at the whole GPU's ceilings
    fixed    seconds of launch and latency
    seconds  the estimate
    bound    limiting part: "launch", "bytes", "NVLink" or "flops"
    whole    whether it needs whole SMs, so that the other lane idles
    """

    work: Work
    floor: float
    fixed: float
    seconds: float
    bound: str
    whole: bool = False

    @property
    def reached(self) -> float:
        """Share of the floor in the estimate."""
        return self.floor / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Placed:
    """Start and end of a step in seconds."""

    start: float
    end: float


def step_costs(program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200) -> list[StepCost]:
    """Return each step's cost, in order."""
    return [_cost(program, step, assume, gpu) for step in program.steps]


def _cost(program: Program, step: Step, assume: Assumptions, gpu: Gpu) -> StepCost:
    done, kind, rows = work(program, step, assume), kind_of(step.op), _rows(step)
    launch = gpu.launch_pdl if step.pdl else gpu.launch + kind.early
    growing = kind.per_rows * min(rows, FULL_ROWS) / FULL_ROWS
    fixed = launch + kind.latency + growing + extra_seconds(program, step, rows, gpu, assume)
    moving, computing = moving_and_computing(done, kind, busy_sms(program, step, rows, gpu), gpu)
    linking = done.link_bytes / (1e9 * gpu.nvlink_gbs)
    floor = max(
        linking,
        done.bytes / gpu.bytes_per_second(),
        sum(flops / gpu.flops_per_second(width) for width, flops in done.flops.items()),
    )
    linked = linking / LINK_REACHED > moving
    moving = max(moving, linking / LINK_REACHED)
    streaming = cbrt(moving**3 + computing**3)
    bound = "launch" if fixed > streaming else "flops" if computing > moving else "NVLink" if linked else "bytes"
    return StepCost(done, floor, fixed, fixed + streaming, bound, takes_whole_sms(program, step, rows, gpu))


def moving_and_computing(done: Work, kind: Kind, sms: float | None, gpu: Gpu = H200) -> tuple[float, float]:
    """Return the seconds of a step's bytes, and of its FLOPs on `sms` SMs (None: all)."""
    moving = done.bytes / min(gpu.bytes_per_second() * kind.reached, gpu.bytes_per_second(sms))
    computing = sum(flops / gpu.flops_per_second(width, sms) for width, flops in done.flops.items())
    taking = done.bytes / (kind.sm_rate * (sms or gpu.sms)) if kind.sm_rate else 0.0
    return moving, computing / kind.reached_flops + taking


def _rows(step: Step) -> int:
    shapes = [view.shape for view in (step.outs or tuple(step.inputs())) if isinstance(view, View) and view.shape]
    return prod(shapes[0][:-1]) if shapes else 1


def estimate(
    program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200, costs: Sequence[StepCost] | None = None
) -> list[Placed]:
    """Return start and end of each step, if it starts as early as its lane and its waits allow.

    Lanes that stream at the same time share the bandwidth. `costs`: use these (such as measured ones) instead of
    `step_costs(...)`.
    """
    costs = step_costs(program, assume, gpu) if costs is None else costs
    return _Lanes(program, costs, gpu).run()


def total_seconds(placed: Sequence[Placed]) -> float:
    """Return the end of the last step."""
    return max((each.end for each in placed), default=0.0)


def floor_seconds(program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200) -> float:
    """Return the lower bound of a program's seconds, for any schedule and fusion.

    It is the longest of three times: to read weights, active adapters and cached tokens once, to compute all FLOPs at
    the GPU's peak rate, and to read the bytes from other GPUs.
    """
    needed: dict[str, int] = {}
    computing = linking = 0.0
    for step in program.steps:
        for name, moved in must_read(program, step, assume):
            needed[name] = max(needed.get(name, 0), moved)
        computing += sum(
            flops / gpu.flops_per_second(width) for width, flops in work(program, step, assume).flops.items()
        )
        linking += link_bytes(program, step) / (1e9 * gpu.nvlink_gbs)
    return max(sum(needed.values()) / gpu.bytes_per_second(), computing, linking)


def critical_path(program: Program, placed: Sequence[Placed]) -> list[int]:
    """Return the steps on the critical path, in order: each is the latest predecessor of the next one."""
    if not placed:
        return []
    before = predecessors(program)
    path = [max(range(len(placed)), key=lambda index: placed[index].end)]
    while before[path[-1]]:
        path.append(max(before[path[-1]], key=lambda index: placed[index].end))
    return path[::-1]


def predecessors(program: Program) -> list[list[int]]:
    """Return the predecessors of each step: the previous step of its lane, and the steps for which it waits."""
    last: dict[str, int] = {}
    result = []
    for step in program.steps:
        result.append([*([last[step.stream]] if step.stream in last else []), *step.waits])
        last[step.stream] = step.index
    return result


@dataclass
class _Running:
    """A running step: remaining seconds of launch and latency, then of streaming if it runs alone; its bandwidth."""

    index: int
    start: float
    fixed: float
    streaming: float
    demand: float


class _Lanes:
    """Simulation of a program on two lanes, from event to event."""

    def __init__(self, program: Program, costs: Sequence[StepCost], gpu: Gpu) -> None:
        self.program, self.costs, self.gpu = program, costs, gpu
        self.peak = gpu.bytes_per_second()
        self.queues = {lane: [step.index for step in program.steps if step.stream == lane] for lane in ("main", "side")}
        self.running: dict[str, _Running] = {}
        self.placed: dict[int, Placed] = {}
        self.now = 0.0

    def run(self) -> list[Placed]:
        self._begin()
        while self.running:
            self._advance()
            self._begin()
        return [self.placed[step.index] for step in self.program.steps]

    def _begin(self) -> None:
        """Start steps with a free lane and finished waits; only one lane runs if a step needs whole SMs."""
        # if both lanes could start a step, the smaller kernel occupies the SMs first
        for lane in sorted(self.queues, key=self._whole):
            if not self._ready(lane) or any(
                self._whole(lane) or self.costs[step.index].whole for step in self.running.values()
            ):
                continue
            index = self.queues[lane].pop(0)
            cost, waits = self.costs[index], self.program.steps[index].waits
            streaming = cost.seconds - cost.fixed
            demand = cost.work.bytes / streaming if streaming > 0 else 0.0
            fixed = cost.fixed + self._crossing(lane, index, waits)
            self.running[lane] = _Running(index, self.now, fixed, streaming, demand)

    def _crossing(self, lane: str, index: int, waits: Sequence[int]) -> float:
        """Return the seconds that waits for the other lane add before the kernel starts."""
        if not waits:
            return 0.0
        if lane == "side":
            return self.gpu.fork
        signalled = max(self.placed[wait].end for wait in waits)
        whole = 0.0 if self.program.steps[index].pdl else self.gpu.join_launch
        return max(0.0, signalled + self.gpu.join - self.now) + whole

    def _ready(self, lane: str) -> bool:
        queue = self.queues[lane]
        waits = self.program.steps[queue[0]].waits if queue else ()
        return lane not in self.running and bool(queue) and all(wait in self.placed for wait in waits)

    def _whole(self, lane: str) -> bool:
        return bool(self.queues[lane]) and self.costs[self.queues[lane][0]].whole

    def _advance(self) -> None:
        """Advance to the next event: a step ends, or starts to stream."""
        wanted = sum(step.demand for step in self.running.values() if step.fixed <= 0)
        speed = 1.0 if wanted <= self.peak else self.peak / wanted
        span = min(step.fixed if step.fixed > 0 else step.streaming / speed for step in self.running.values())
        self.now += span
        for lane, step in list(self.running.items()):
            if step.fixed > 0:
                step.fixed = step.fixed - span if step.fixed > span * (1 + 1e-9) else 0.0
            else:
                step.streaming = step.streaming - span * speed if step.streaming > span * speed * (1 + 1e-9) else 0.0
            if step.fixed <= 0 and step.streaming <= 0:
                self.placed[step.index] = Placed(step.start, self.now)
                del self.running[lane]
