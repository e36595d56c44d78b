"""`sidestream bench kernels`: time every op of a decode layer alone (workload K), next to the time for its bytes.

The steps are those of a program of Llama-3.1-8B's shape with six layers of random weights, in int8 or e4m3. One op's
launches of all six layers run in a row in a CUDA graph, so its weights (100 MB and more) are never in the L2 cache.
Launches do not overlap (no programmatic dependent launch).

A second table times attention alone, for each cache dtype: decode next to the memory's bandwidth, prefill next to the
peak of the tensor cores.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compiler.options import DEFAULT_PRECISION
from ..options.engine import add_command, add_value
from ..options.environment import write_figures
from ..options.models import zipf
from .kernels_attention import measure_attention
from .layer import CONTEXT, DEPTHS, Layers, Variant, launch_us

if TYPE_CHECKING:
    from ...compiler.cost.hardware import Gpu

ROUNDS = 8  # repetitions of all layers' launches in a graph
CHOICES = (1, 16, 64, 256)

EXAMPLES = """\
examples:
  sidestream bench kernels                 all ops for 1, 16, 64 and 256 sequences
  sidestream bench kernels --tokens 64 --precision fp8
  sidestream bench kernels --only attention"""


@dataclass(frozen=True)
class Row:
    """Times of one op of the layer in microseconds."""

    tokens: int
    place: int
    op: str
    output: str
    us: float
    floor_us: float


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the bench to the `sidestream bench` parser."""
    parser = add_command(
        commands, "kernels", "time every op of a decode layer alone (needs a GPU)", __doc__, EXAMPLES, run
    )
    add_value(parser, "--tokens", list(CHOICES), "sequences", metavar="T", nargs="+")
    parser.add_argument(
        "--precision",
        choices=("int8", "fp8"),
        default=DEFAULT_PRECISION,
        help="precision of the ops (default: %(default)s)",
    )
    add_value(parser, "--lora-rank", 32, "rank of the adapters", metavar="R")
    add_value(parser, "--num-adapters", 8, "resident adapters, mixed by p(k) ~ 1/k")
    add_value(parser, "--repeats", 9, "timed replays, for the median")
    parser.add_argument("--only", choices=("ops", "attention"), help="one of the two tables (default: both)")
    add_value(parser, "--output-json", Path("bench-kernels.json"), "file of the figures", Path, "FILE")


def run(options: argparse.Namespace) -> int:
    """Measure and print the tables. Raises ValueError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench kernels times CUDA kernels, and this machine has no GPU")
    from ...compiler.cost.hardware import gpu_of

    gpu = gpu_of()
    tables: dict[str, Any] = {"workload": "K", "floor_of": gpu.to_json()}
    print(f"floor, and shares of attention over the cache: at {gpu.describe_bandwidth()}")
    if options.only != "attention":
        tables.update(precision=options.precision, rows=print_ops(options, gpu))
    if options.only != "ops":
        tables["attention"] = print_attention(options.repeats, gpu)
    write_figures(options.output_json, tables)
    return 0


def print_ops(options: argparse.Namespace, gpu: "Gpu") -> list[dict[str, Any]]:
    """Print the ops of a layer row by row, and return the rows."""
    from ...compiler.options import CompileOptions

    layers = Layers(options.lora_rank, options.num_adapters, options=CompileOptions(precision=options.precision))
    rows: list[dict[str, Any]] = []
    print(f"{'T':>4}  {f'op ({options.precision})':<36}{'result':<24}{'us':>8}{'floor':>8}{'share':>7}")
    for tokens in options.tokens:
        adapters = zipf(range(options.num_adapters), tokens)
        for row in measure(layers, tokens, adapters, options.repeats, gpu):
            rows.append(asdict(row))
            print(
                f"{row.tokens:>4}  "
                f"{row.op:<36}{row.output:<24}{row.us:>8.2f}{row.floor_us:>8.2f}{row.floor_us / row.us:>7.0%}",
                flush=True,
            )
    return rows


def print_attention(repeats: int, gpu: "Gpu") -> list[dict[str, Any]]:
    """Print attention row by row, and return the rows."""
    rows: list[dict[str, Any]] = []
    print(f"{'attention':<10}{'sequences x tokens':<27}{'cache':<14}{'us':>10}{'rate':>16}{'share':>7}")
    for row in measure_attention(repeats, gpu):
        rows.append(asdict(row))
        share = f"{row.share:>7.0%}" if row.share else f"{'-':>7}"
        unit = "GB/s" if row.kind == "decode" else "TFLOP/s"
        print(
            f"{row.kind:<10}{row.shape:<27}{row.cache:<14}{row.us:>10.2f}{row.rate:>8.0f} {unit:<7}{share}", flush=True
        )
    return rows


def measure(layers: Layers, tokens: int, adapters: Sequence[int], repeats: int, gpu: "Gpu") -> list[Row]:
    """Time every step that each layer has once, over all layers, next to the time for its bytes on `gpu`."""
    from ...compiler.cost.bytes_and_flops import Assumptions, step_bytes
    from ...compiler.run.bound_program import BoundProgram

    depth = DEPTHS[-1]
    program = layers.program(depth, tokens, Variant("serial", pdl=False))
    bound = BoundProgram(program, layers.tensors(depth, tokens, adapters), layers.device)
    bound.run()  # so that every input is a real activation
    assume = Assumptions(context=CONTEXT, adapters=len(set(adapters)))
    rows = []
    for place, indices in enumerate(repeated_steps(program, depth)):
        step = program.steps[indices[0]]
        floor = step_bytes(program, step, assume) / gpu.bytes_per_second() * 1e6
        # unused outputs are empty
        shape = "x".join(map(str, next((out.shape for out in step.outs if 0 not in out.shape), ())))
        us = launch_us([partial(bound.run_step, index) for index in indices], ROUNDS, repeats)
        rows.append(Row(tokens, place, step.op, shape, round(us, 3), round(floor, 3)))
    return rows


def repeated_steps(program: Any, depth: int) -> list[list[int]]:
    """Return the indices of steps that occur once in each layer, in the order of a layer's steps."""
    from ...compiler.program.layers import step_layers

    by_layer: list[list[int]] = [[] for _ in range(depth)]
    for index, layer in enumerate(step_layers(program)):
        if 0 <= layer < depth:
            by_layer[layer].append(index)
    middle = by_layer[1:-1]  # the first and the last layer may differ
    return [list(group) for group in zip(*middle, strict=True)]
