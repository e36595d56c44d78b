"""About how long a program takes, and why: each step's bytes and FLOPs at the GPU's ceilings, what a launch costs, and
both lanes on one time axis.

    seconds of a step = launch + latency of its kind of kernel + cbrt(moving^3 + computing^3)
    moving = bytes / reached bandwidth, computing = FLOPs / reached rate

The longer of the two decides, but where they are about as long a kernel hides neither wholly under the other: a
quarter more when they are equal, as linears of 128 and 256 tokens show (docs/measurements/tune_h200.txt).
Steps of the two lanes that run at once share the memory's bandwidth; a cuBLAS product needs whole SMs, so it runs while
the other lane rests. The constants in `KINDS` come from measured steps, kernels and layers, not from whole decode
steps; `docs/measurements/cost_check_h200.txt` compares the estimates of those with measurements, `cost_model_h200.txt`
those of an earlier release step by step. tools/bench/cost_error.py writes both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cbrt, prod

import torch

from ...ops.linear.scaled_mm import scaled_mm_takes
from ...ops.linear.tuning import linear_config
from ..program.buffers import View
from ..program.calls import traits_of
from ..program.program import Program, Step
from .hardware import H200, Gpu
from .work import DEFAULT, Assumptions, Work, must_read, step_bytes, work

__all__ = [
    "Assumptions",
    "Placed",
    "StepCost",
    "critical_path",
    "estimate",
    "floor_seconds",
    "kind_of",
    "step_bytes",
    "step_costs",
    "total_seconds",
]


# cost_check_h200.txt
KNOWN_ERROR = (
    "3% on average, 9% at most, over whole decode steps of Llama-3.1-8B's shape on an H200, 1 to 256 sequences"
)


@dataclass(frozen=True)
class Kind:
    """Kernels that are about as fast as each other; an op names its kind when it is registered.

    latency       seconds beyond the launch that a small instance takes: dependency wait, first loads, the last CTA's
                  end
    per_rows      further seconds at 64 rows of activations and more, below in proportion
    reached       share of the memory's bandwidth (of the SMs that it may use) in its inner loop, above 1 where the rows
                  still lie in the L2 cache
    reached_flops share of the tensor cores' rate
    """

    latency: float
    reached: float
    reached_flops: float = 0.5
    per_rows: float = 0.0


# Where no other file of docs/measurements is named: fitted to the single steps of
# cost_model_h200.txt.
KINDS: dict[str, Kind] = {
    # times by layer (ops/decoder_block/decoder_block.py) less attention and rope_append
    "decoder_block": Kind(10.5e-6, 0.93, per_rows=14.0e-6),
    "linear": Kind(1.2e-6, 0.97, 0.72, per_rows=3.0e-6),  # FLOPs: tune_h200.txt, 256 and 512 tokens
    "plan": Kind(0.6e-6, 0.5),  # what is worked out once a step
    "widen_kv": Kind(1.2e-6, 0.8),
    "lora": Kind(2.4e-6, 0.35),
    "attention": Kind(4.2e-6, 0.95, 0.45),  # bench_attention_h200.txt
    "rope_append": Kind(2.2e-6, 0.5),  # bytes: bench_kernels_h200.txt, 256 tokens
    "silu_mul": Kind(2.8e-6, 1.2),  # bytes: the same
    "rope_angles": Kind(2.4e-6, 0.7),
    "norm": Kind(1.4e-6, 1.2),  # bytes: the same
    "rows": Kind(0.5e-6, 0.7),  # what names no other kind: small, or once a step
    "product": Kind(2.0e-6, 0.75),  # ATen's linears
    "foreign": Kind(1.2e-6, 0.7),  # all else of ATen's
}


@dataclass(frozen=True)
class StepCost:
    """What one step costs when nothing runs at the same time.

    `floor`: seconds that its bytes and FLOPs take at the whole GPU's ceilings; `fixed`: launch and latency; `seconds`:
    the estimate; `bound`: what decides it ("launch", "bytes" or "flops"); `whole`: it takes whole SMs, so nothing of
    the other lane runs meanwhile.
    """

    work: Work
    floor: float
    fixed: float
    seconds: float
    bound: str
    whole: bool = False

    @property
    def reached(self) -> float:
        """The floor's share of the estimate."""
        return self.floor / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Placed:
    """A step on the estimated time axis, in seconds."""

    start: float
    end: float


def kind_of(op: str) -> Kind:
    """The entry of KINDS for an op's name."""
    return KINDS[traits_of(op).kind]


def step_costs(program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200) -> list[StepCost]:
    """Each step's cost, in order."""
    return [_cost(program, step, assume, gpu) for step in program.steps]


def _cost(program: Program, step: Step, assume: Assumptions, gpu: Gpu) -> StepCost:
    done, kind = work(program, step, assume), kind_of(step.op)
    launch = gpu.launch_pdl if step.pdl else gpu.launch
    fixed = launch + kind.per_rows * min(_rows(step), 64) / 64 + kind.latency
    moving = done.bytes / (gpu.bytes_per_second(step.sm_budget) * kind.reached)
    computing = (
        sum(flops / gpu.flops_per_second(width, step.sm_budget) for width, flops in done.flops.items())
        / kind.reached_flops
    )
    floor = max(
        done.bytes / gpu.bytes_per_second(),
        sum(flops / gpu.flops_per_second(width) for width, flops in done.flops.items()),
    )
    streaming = cbrt(moving**3 + computing**3)
    bound = "launch" if fixed > streaming else "bytes" if moving >= computing else "flops"
    return StepCost(done, floor, fixed, fixed + streaming, bound, _takes_whole_sms(program, step, gpu))


def _takes_whole_sms(program: Program, step: Step, gpu: Gpu) -> bool:
    """Whether a linear is cuBLAS's or the large kernel's, which find no room while smaller CTAs lie on the SMs.

    See docs/measurements/workload_g_h200_trace_lora.json.gz.
    """
    if step.op == "sidestream.linear_8bit_lora":
        return True
    if step.op != "sidestream.linear_8bit" or step.sm_budget is not None:
        return False
    weight = next(
        view for view in step.inputs() if program.by_name[view.buffer].kind == "weight" and len(view.shape) == 2
    )
    (n, k), out = weight.shape, step.outs[0]
    takes = scaled_mm_takes(n, k, out.dtype or program.by_name[out.buffer].dtype)
    int8 = (weight.dtype or program.by_name[weight.buffer].dtype) == torch.int8
    return linear_config(_rows(step), n, k, gpu.sms, takes, int8=int8).kernel in ("scaled_mm", "large")


def _rows(step: Step) -> int:
    shapes = [view.shape for view in (step.outs or tuple(step.inputs())) if isinstance(view, View) and view.shape]
    return prod(shapes[0][:-1]) if shapes else 1


def estimate(
    program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200, costs: Sequence[StepCost] | None = None
) -> list[Placed]:
    """Start and end of each step: as early as its lane and its waits allow; where both lanes stream, they share the
    memory's bandwidth.

    `costs`: use these instead of `step_costs(...)` (measured ones, say).
    """
    costs = step_costs(program, assume, gpu) if costs is None else costs
    return _Lanes(program, costs, gpu).run()


def total_seconds(placed: Sequence[Placed]) -> float:
    """When the last step ends."""
    return max((each.end for each in placed), default=0.0)


def floor_seconds(program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200) -> float:
    """What no schedule and no fusion goes below: weights, active adapters and cached tokens read once, or all FLOPs
    at the GPU's peak.
    """
    needed: dict[str, int] = {}
    computing = 0.0
    for step in program.steps:
        for name, moved in must_read(program, step, assume):
            needed[name] = max(needed.get(name, 0), moved)
        computing += sum(
            flops / gpu.flops_per_second(width) for width, flops in work(program, step, assume).flops.items()
        )
    return max(sum(needed.values()) / gpu.bytes_per_second(), computing)


def critical_path(program: Program, placed: Sequence[Placed]) -> list[int]:
    """The steps that decide when the program ends, in order: from the last one back, each time to what it waited for
    longest.
    """
    if not placed:
        return []
    before = predecessors(program)
    path = [max(range(len(placed)), key=lambda index: placed[index].end)]
    while before[path[-1]]:
        path.append(max(before[path[-1]], key=lambda index: placed[index].end))
    return path[::-1]


def predecessors(program: Program) -> list[list[int]]:
    """For each step the one before it in its lane, and those it waits for."""
    last: dict[str, int] = {}
    result = []
    for step in program.steps:
        result.append([*([last[step.stream]] if step.stream in last else []), *step.waits])
        last[step.stream] = step.index
    return result


@dataclass
class _Running:
    """A step under way: seconds of launch and latency left, then seconds of streaming left (were it alone), and the
    bandwidth it streams with.
    """

    index: int
    start: float
    fixed: float
    streaming: float
    demand: float


class _Lanes:
    """Plays a program on two lanes, from one completion to the next."""

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
        """Start what may start: its lane is free, what it waits for has ended, and of two lanes only one runs when a
        step takes whole SMs.
        """
        # where both could start, the smaller kernel is on the SMs first
        for lane in sorted(self.queues, key=self._whole):
            if not self._ready(lane) or any(
                self._whole(lane) or self.costs[step.index].whole for step in self.running.values()
            ):
                continue
            index = self.queues[lane].pop(0)
            cost, waits = self.costs[index], self.program.steps[index].waits
            streaming = cost.seconds - cost.fixed
            demand = cost.work.bytes / streaming if streaming > 0 else 0.0
            self.running[lane] = _Running(
                index, self.now, cost.fixed + self.gpu.cross_stream * bool(waits), streaming, demand
            )

    def _ready(self, lane: str) -> bool:
        queue = self.queues[lane]
        return (
            lane not in self.running
            and bool(queue)
            and all(wait in self.placed for wait in self.program.steps[queue[0]].waits)
        )

    def _whole(self, lane: str) -> bool:
        return bool(self.queues[lane]) and self.costs[self.queues[lane][0]].whole

    def _advance(self) -> None:
        """To the next moment at which a step ends or begins to stream."""
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
