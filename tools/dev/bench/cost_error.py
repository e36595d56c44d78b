"""Compare the cost model's estimates of decode programs with measured steps.

    python -m sidestream.tools.dev.bench.cost_error -o docs/measurements/cost_model_h200
    python -m sidestream.tools.dev.bench.cost_error --steps docs/measurements/bench_latency_h200.json -o
        docs/measurements/cost_check_h200

The model has Llama-3.1-8B's shape and random weights. Each program is captured as a CUDA graph and replayed under the
profiler; a step's time is what it adds to its lane (from the end of the step it follows to its own end). Writes
PREFIX.txt (also printed) and PREFIX.json. --steps compares estimates of whole decode steps with figures of `sidestream
bench latency` instead, without a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from ....compiler.api import CompiledModel, compile_model
from ....compiler.cost.bytes_and_flops import Assumptions
from ....compiler.cost.estimate import estimate, floor_seconds, step_costs, total_seconds
from ....compiler.cost.hardware import H200, Gpu, UnknownGpu, gpu_named, gpu_of
from ....compiler.inspect.profile import advances, capture_profile
from ....compiler.options import DEFAULT_LORA_DTYPE, CompileOptions, LoraDtype
from ....compiler.pass_records import columns
from ....compiler.program.program import Bucket, Program
from ....compiler.run.bound_program import BoundProgram
from ....graphs.config import LlamaConfig
from ....graphs.llama import Llama
from ....graphs.lora import LoraShape
from ....ops.core.kv_layout import pages_for
from ...bench.latency import SHORT_OUTPUT
from ...bench.layer import elapsed_us
from ...bench.random_model import random_tensors
from ...options.models import LLAMA_8B

BLOCKS = 8
REPLAYS = 5
BACK_TO_BACK = 20  # replays of the whole program, without a profiler


@dataclass(frozen=True)
class OpRow:
    """All steps of an op (linears by their weight's shape) in microseconds; `error` is estimated / measured - 1."""

    op: str
    lane: str
    count: int
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the estimate."""
        return self.estimated / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class Measured:
    """A program's figures in microseconds; `steps` has (estimated, measured) of each step."""

    program: str
    floor: float
    estimated: float
    measured: float
    rows: tuple[OpRow, ...]
    steps: tuple[tuple[str, float, float, int], ...]


def measure(bound: BoundProgram, replays: int = REPLAYS) -> tuple[list[float], float]:
    """Return (seconds that each step adds, seconds of the whole program), medians over replays.

    On a CPU the steps run one by one.
    """
    if bound.device.type != "cuda":
        seconds = bound.step_times(replays)
        return seconds, sum(seconds)
    found = capture_profile(bound, replays)
    each = [advances(bound.program, placed) for placed in found]
    return [statistics.median(values) for values in zip(*each, strict=True)], 1e-6 * elapsed_us(
        bound.replay, BACK_TO_BACK
    )


def compare(program: Program, seconds: Sequence[float], whole: float, assume: Assumptions, gpu: Gpu) -> Measured:
    """Return estimates and measurements by op."""
    costs = step_costs(program, assume, gpu)
    placed = estimate(program, assume, gpu, costs)
    adds = advances(program, placed)
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    steps = []
    for step, estimated, measured in zip(program.steps, adds, seconds, strict=True):
        groups.setdefault((_label(program, step.index), step.stream), []).append((estimated * 1e6, measured * 1e6))
        steps.append((_label(program, step.index), estimated * 1e6, measured * 1e6, costs[step.index].work.bytes))
    rows = tuple(
        OpRow(op, lane, len(own), sum(one for one, _ in own), sum(two for _, two in own))
        for (op, lane), own in groups.items()
    )
    return Measured(
        program.name,
        floor_seconds(program, assume, gpu) * 1e6,
        total_seconds(placed) * 1e6,
        whole * 1e6,
        rows,
        tuple(steps),
    )


def _label(program: Program, index: int) -> str:
    """Return an op's name, with the weight's shape for products."""
    step = program.steps[index]
    shapes = [
        view.shape
        for view in step.inputs()
        if program.by_name[view.buffer].kind in ("weight", "adapter") and len(view.shape) > 1
    ]
    wide = "embedding" not in step.op and bool(shapes)
    return (
        f"{step.op.removeprefix('sidestream.')} {'x'.join(map(str, shapes[0]))}"
        if wide
        else step.op.removeprefix("sidestream.")
    )


def text(results: Iterable[Measured], title: str) -> str:
    """Return the published table."""
    parts = [title]
    for result in results:
        rows = [("op", "lane", "steps", "estimated us", "measured us", "error")]
        rows += [
            (row.op, row.lane, str(row.count), f"{row.estimated:.1f}", f"{row.measured:.1f}", f"{row.error:+.0%}")
            for row in result.rows
        ]
        weight = sum(row.measured for row in result.rows)
        typical = sum(abs(row.estimated - row.measured) for row in result.rows) / weight if weight else 0.0
        head = (
            f"{result.program}: estimated {result.estimated:.0f} us, measured {result.measured:.0f} us "
            f"({result.estimated / result.measured - 1:+.1%}), "
            f"floor {result.floor:.0f} us; mean error of an op, weighted by its time: {typical:.0%}"
        )
        parts.append(head + "\n" + columns(rows, right=(2, 3, 4, 5)))
    return "\n".join(parts)


@dataclass(frozen=True)
class WholeStep:
    """A decode step of `concurrency` sequences in milliseconds; `measured` includes sampling and pauses of the host."""

    lora: str
    concurrency: int
    adapters: int
    kernels: int
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the estimate."""
        return self.estimated / self.measured - 1


def whole_steps(
    bench: dict[str, Any], layers: int | None = None, lora_dtype: LoraDtype = "auto"
) -> tuple[list[WholeStep], int]:
    """Return (present estimates next to the rows of a `sidestream bench latency` JSON, cached tokens per sequence).

    The cached tokens are those in the middle of the timed steps.
    """
    asked = bench["options"]
    fields = {**bench["config"], "num_hidden_layers": layers or bench["config"]["num_hidden_layers"]}
    gpu = gpu_named(bench["environment"]["gpus"][0]["name"]) if bench["environment"]["gpus"] else H200
    chosen = CompileOptions(
        precision=asked["precision"],
        kv_dtype=asked["kv_cache_dtype"],
        disable=tuple(asked["disable_pass"]),
        lora_dtype=lora_dtype,
    )
    adapters = LoraShape(asked["num_adapters"], asked["lora_rank"])
    model = Llama(LlamaConfig.from_dict(fields), adapters, chosen.model_dtype, device="meta")
    compiled = compile_model(model, chosen, text=False)
    context = asked["input_len"] + (SHORT_OUTPUT + asked["output_len"]) // 2
    blocks, found = pages_for(asked["input_len"] + asked["output_len"]), []
    for row in bench["rows"]:
        count, lora = row["concurrency"], row["lora"] != "none"
        program = compiled.program(Bucket(count, count, count * blocks + 1, blocks, decode=True, lora=lora))
        seconds = total_seconds(estimate(program, Assumptions(context, row["active_adapters"] or None), gpu))
        found.append(
            WholeStep(row["lora"], count, row["active_adapters"], len(program.steps), seconds * 1e3, row["ms_per_step"])
        )
    return found, context


def whole_steps_text(found: Sequence[WholeStep], bench: dict[str, Any], context: int, held: str) -> str:
    """Return the published table."""
    gpus, packages, layers = (
        bench["environment"]["gpus"],
        bench["environment"]["packages"],
        bench["config"]["num_hidden_layers"],
    )
    rows = [("lora", "C", "adapters", "kernels", "estimated ms", "measured ms", "error")]
    for each in found:
        counts = (str(each.concurrency), str(each.adapters), str(each.kernels))
        rows.append((each.lora, *counts, f"{each.estimated:.3f}", f"{each.measured:.3f}", f"{each.error:+.1%}"))
    mean, worst = statistics.mean(abs(each.error) for each in found), max((each.error for each in found), key=abs)
    return (
        "The cost model's whole decode steps against `sidestream bench latency` on: "
        f"{gpus[0]['name'] if gpus else 'a CPU'}; "
        f"torch {packages['torch']}, triton {packages['triton']}\n"
        f"{bench['model']}, {layers} layers, adapters of rank {bench['options']['lora_rank']} in {held}, {context} "
        "cached tokens a sequence.\n"
        "The estimate is of the program alone; the measurement also holds the choice of tokens, copies and the "
        "host's pauses between steps.\n"
        "The constants were fitted to these rows together with the ablation's (compiler/cost/kernel_costs.py); "
        "estimated changes: docs/measurements/estimated_changes.txt.\n"
        f"Mean error {mean:.1%}, largest {worst:+.1%}.\n\n{columns(rows, right=range(1, 7))}"
    )


def _check(options: argparse.Namespace) -> int:
    bench = json.loads(options.steps.read_text())
    found, context = whole_steps(bench, options.layers, options.lora_dtype)
    held = (
        DEFAULT_LORA_DTYPE.get(bench["options"]["precision"], "bf16")
        if options.lora_dtype == "auto"
        else options.lora_dtype
    )
    shown = whole_steps_text(found, bench, context, held)
    print(shown)
    if options.output is not None:
        options.output.with_suffix(".txt").write_text(shown)
        options.output.with_suffix(".json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


def run(options: argparse.Namespace) -> int:
    """Measure every bucket, print and write."""
    if options.steps is not None:
        return _check(options)
    device = torch.device(options.device)
    earlier = json.loads(options.measured.read_text()) if options.measured else None
    here = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "a CPU (the model's figures are the H200's, so the error says nothing)"
    )
    on = earlier["device"] if earlier else here
    try:
        gpu = gpu_of(device) if earlier is None and device.type == "cuda" else gpu_named(on)
    except UnknownGpu:
        gpu = H200
    fields: dict[str, Any] = json.loads(options.config.read_text()) if options.config else LLAMA_8B
    fields = {**fields, "num_hidden_layers": options.layers or fields["num_hidden_layers"]}
    model = Llama(
        LlamaConfig.from_dict(fields),
        LoraShape(options.max_loras, options.rank),
        CompileOptions().model_dtype,
        device="meta",
    )
    begin = time.perf_counter()
    compiled = compile_model(model)
    shape = "Llama-3.1-8B's shape" if options.config is None else str(options.config)
    release = earlier["torch"] if earlier else torch.__version__
    title = (
        f"The cost model ({gpu.name}) against steps measured on: {on}; torch {release}\n{shape}, "
        f"{fields['num_hidden_layers']} layers, "
        f"random weights, {CompileOptions().precision}, {options.max_loras} adapters of rank {options.rank}, context "
        f"{options.context}. "
        "Microseconds of all steps of an op together.\n"
    )
    print(f"{title}compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    results = []
    for result in (
        _each_bucket(compiled, options, device, gpu) if earlier is None else _again(compiled, options, earlier, gpu)
    ):
        results.append(result)
        print(text([result], ""), flush=True)
        if options.output is not None:
            options.output.with_suffix(".txt").write_text(text(results, title))
            content = {"device": on, "torch": release, "gpu": gpu.name, "results": [asdict(each) for each in results]}
            options.output.with_suffix(".json").write_text(json.dumps(content) + "\n")
    return 0


def _buckets(options: argparse.Namespace) -> Iterable[Bucket]:
    most = max(options.tokens)
    return (
        Bucket(tokens, tokens, most * BLOCKS + 1, BLOCKS, decode=True, lora=lora)
        for lora in (True, False)
        for tokens in options.tokens
    )


def _each_bucket(
    compiled: CompiledModel, options: argparse.Namespace, device: torch.device, gpu: Gpu
) -> Iterable[Measured]:
    known: dict[str, torch.Tensor] = {}
    assume = Assumptions(context=options.context)
    for bucket in _buckets(options):
        program = compiled.program(bucket)
        bound = BoundProgram(program, random_tensors(program, device, assume, known), device)
        seconds, whole = measure(bound, options.replays)
        yield compare(program, seconds, whole, assume, gpu)


def _again(
    compiled: CompiledModel, options: argparse.Namespace, earlier: dict[str, Any], gpu: Gpu
) -> Iterable[Measured]:
    """Compare the present model with the steps of an earlier run.

    Raises ValueError if today's programs have other steps.
    """
    found = {result["program"]: result for result in earlier["results"]}
    for bucket in _buckets(options):
        program = compiled.program(bucket)
        result = found.get(program.name)
        if result is None or [step[0] for step in result["steps"]] != [
            _label(program, index) for index in range(len(program.steps))
        ]:
            raise ValueError(
                f"{options.measured} has other steps for {program.name} than this release compiles; measure again"
            )
        yield compare(
            program,
            [step[2] * 1e-6 for step in result["steps"]],
            result["measured"] * 1e-6,
            Assumptions(context=options.context),
            gpu,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m sidestream.tools.dev.bench.cost_error",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PREFIX", help="write PREFIX.txt and PREFIX.json")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="measure nothing: hold the estimates against the steps in FILE, an earlier PREFIX.json",
    )
    parser.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="measure nothing: hold estimates of whole steps against FILE, of `sidestream bench latency`",
    )
    parser.add_argument(
        "--lora-dtype",
        choices=get_args(LoraDtype),
        default="auto",
        help="what the adapters of --steps were held in (default: %(default)s)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json (default: Llama-3.1-8B's shape)")
    parser.add_argument("--layers", type=int, metavar="N", help="decoder layers (default: the config's)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 16, 64], metavar="T", help="decode batch sizes (default: 1 16 64)"
    )
    parser.add_argument(
        "--context", type=int, default=256, metavar="N", help="cached tokens of each sequence (default: %(default)s)"
    )
    parser.add_argument("--max-loras", type=int, default=8, metavar="N", help="adapters (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=32, metavar="R", help="their rank (default: %(default)s)")
    parser.add_argument(
        "--replays",
        type=int,
        default=REPLAYS,
        metavar="N",
        help="profiled replays; medians count (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu (default: cuda where there is one)",
    )
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
