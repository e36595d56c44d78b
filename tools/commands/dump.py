"""`sidestream inspect dump`: compile a model without its weights, and write its graphs, passes and programs."""

import argparse
import contextlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..options.engine import (
    add_command,
    add_compile_options,
    add_lora_options,
    add_model,
    add_ranks,
    check_output_directory,
    compile_arguments,
    ranks_arguments,
    writing,
)
from ..options.models import add_buckets, add_shape, as_bucket, lora_shape, model_config

DESCRIPTION = """\
Compile a model and write a dump: each pass's graph before and after as readable Python, its diff, op counts and
refusals with reasons, the programs as text and JSON, the schedule on its two lanes as SVG and as a trace, and
index.html, a page over all of it. The same model, options and version give the same bytes, except for timings.json. No
weights are read, so an 8B model takes seconds and little memory. Times are estimates for an H200, or for the measured
GPU."""

EXAMPLES = """\
examples:
  sidestream inspect dump                                       the demo model, into sidestream_dump/
  sidestream inspect dump models/llama --max-loras 8 --max-lora-rank 32 -o dump/
  sidestream inspect dump --shape llama-3.1-8b --layers 0       a shape without files; graphs of layer 0 only
  sidestream inspect dump --disable-pass pack_projections -o without/
  sidestream inspect dump --bucket 64 mixed:512                 decode steps of 64 sequences, and mixed steps
  sidestream inspect dump --resources                           registers, shared memory and spills of all kernels
  sidestream inspect dump --measure                             also times of this machine
  sidestream inspect dump --timings --measured gpu/timings.json  also times of --measure on another machine"""


def layer(text: str) -> int:
    """Parse the number of a layer."""
    if not re.fullmatch(r"\d{1,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer; layers are numbered from 0")
    return int(text)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to `sidestream inspect`."""
    usage = "%(prog)s [MODEL | --shape NAME] [-o DIR] [options]"
    parser = add_command(
        commands, "dump", "write graphs, passes and programs of a compiled model", DESCRIPTION, EXAMPLES, run, usage
    )
    add_model(parser)
    add_shape(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("sidestream_dump"),
        metavar="DIR",
        help="output (default: %(default)s)",
    )
    add_buckets(parser, "programs to write; N alone is decode:N")
    parser.add_argument(
        "--layers", nargs="+", type=layer, metavar="N", help="write the graphs of these layers only (default: all)"
    )
    parser.add_argument(
        "--timings", action="store_true", help="show measured times on the page, which then differs from run to run"
    )
    parser.add_argument("--measure", action="store_true", help="time the programs' steps here; includes --resources")
    parser.add_argument(
        "--resources",
        action="store_true",
        help="compile every kernel, and show its registers, shared memory and spills",
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="a timings.json of --measure on another machine, for --timings"
    )
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="JSON of `sidestream inspect ledger`, for the page")
    add_ranks(parser)
    add_compile_options(parser)
    add_lora_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compile on the meta device and write the dump."""
    config = model_config(options)
    check_output_directory("--output", options.output)
    from ...compiler.api import compile_model
    from ...compiler.cost.hardware import H200, UnknownGpu, gpu_named, gpu_of
    from ...compiler.cost.timings import Timings
    from ...compiler.options import CompileOptions
    from ...graphs.llama import Llama

    if options.measured is not None and options.measure:
        raise ValueError(
            "--measure and --measured FILE contradict each other: measure here, or read times of another machine"
        )
    if options.measured is not None and not options.timings:
        raise ValueError("--measured FILE is shown on the page with --timings only; add --timings")
    if (options.measure or options.resources) and (options.tensor_parallel_size or 1) > 1:
        raise ValueError("--measure and --resources are for one process; leave --tensor-parallel-size out")
    timings = None if options.measured is None else Timings.load(options.measured)
    gpu = H200
    if timings is not None:
        with contextlib.suppress(UnknownGpu):
            gpu = gpu_named(timings.device)
    ledger = None if options.ledger is None else read_ledger(options.ledger)
    compile_options = CompileOptions(**compile_arguments(options), **ranks_arguments(options))
    unknown = [number for number in options.layers or () if number >= config.num_hidden_layers]
    if unknown:
        raise ValueError(f"--layers {unknown[0]}: the model has layers 0 to {config.num_hidden_layers - 1}")
    model = Llama(config, lora_shape(options, config), compile_options.model_dtype, device="meta")
    started = time.monotonic()
    compiled = compile_model(model, compile_options)
    buckets = [as_bucket(kind, count, model.lora is not None) for kind, count in options.bucket]
    if options.measure:
        import torch

        from .measured_steps import measured_timings

        on_gpu = torch.cuda.is_available()
        timings = measured_timings(compiled, buckets, torch.device("cuda" if on_gpu else "cpu"))
        gpu = gpu_of() if on_gpu else gpu
    if options.resources or options.measure:
        from .measured_steps import kernel_resources

        resources = kernel_resources(compiled, buckets, sys.stderr.isatty())
        timings = replace(timings or Timings(), resources=resources)
        for op, reason in resources.refused.items():
            print(f"{op}: not compiled, {reason}", file=sys.stderr)
    show = options.timings or options.measure
    with writing(options.output):
        written = compiled.dump(
            options.output,
            buckets,
            layers=options.layers,
            timings=timings,
            show_timings=show,
            show_resources=options.resources,
            ledger=ledger,
            gpu=gpu,
        )
    print(compiled.report())
    count = sum(path.is_file() for path in written.rglob("*"))
    print(
        f"compiled in {time.monotonic() - started:.1f} s for precision {compile_options.precision}; {count} files in "
        f"{written}; open {written / 'index.html'} in a browser"
    )
    return 0


def read_ledger(path: Path) -> dict[str, float]:
    """Return pass name -> relative error. Raises ValueError for anything but a JSON object of numbers."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--ledger {path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in data.values()
    ):
        raise ValueError(
            f'--ledger {path} must be an object of pass names and numbers, such as {{"quantize_kv": 0.002}}'
        )
    return data
