"""Workloads A and P on vLLM and on Sidestream, in turn: `python -m sidestream.tools.dev.bench.versus_vllm`.

Each engine runs `engine_run` in its own process, once without and once with adapters, so that neither the other engine
nor unused adapters affect it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....graphs.config import LlamaConfig
from ...bench import engine_run
from ...bench.engine_run import RESULT, SHORT_OUTPUT
from ...bench.latency import model_fields
from ...bench.random_model import write_model, write_random_adapters
from ...bench.throughput import PREFILL
from ...options.engine import add_value, check_output, share
from ...options.environment import write_figures
from ...options.models import add_bench_model, add_random_adapters, pick_adapters
from ..command_line import dev_parser

ENGINES = ("vllm", "sidestream")
DESCRIPTION = """\
Run the same workloads on vLLM and on Sidestream, in turn, on this machine, and print one table.

  A   C requests at once, 128 prompt tokens and 256 outputs each: milliseconds per decode step (what 256 outputs take
      longer than 32), output tokens per second
  P   16 prompts of 2,048 tokens with one output each: prompt tokens per second

Prompts are random token ids, sampling is greedy, the end of a sequence is ignored, no prefix is cached. By default the
model has the shape of Llama-3.1-8B with random weights and the adapters are random; nothing is downloaded. vLLM must be
installed: in this environment, or in another one that --vllm-python names."""

EXAMPLES = """\
examples:
  python -m sidestream.tools.dev.bench.versus_vllm
  python -m sidestream.tools.dev.bench.versus_vllm models/llama --concurrency 1 64 256 --lora none
  python -m sidestream.tools.dev.bench.versus_vllm --vllm-python ~/vllm/bin/python
  python -m sidestream.tools.dev.bench.versus_vllm --lora zipf --vllm-args '{"specialize_active_lora": true}'"""


class EngineRunError(Exception):
    """An engine's process failed; the message has the reason."""


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"enforce_eager": true}}')
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = dev_parser("bench.versus_vllm", DESCRIPTION, EXAMPLES)
    add_bench_model(parser)
    group = parser.add_argument_group("workloads")
    group.add_argument("--workloads", nargs="+", choices=("A", "P"), default=["A", "P"], help="(default: A P)")
    add_value(group, "--concurrency", [1, 8, 64], "requests at once in A", metavar="C", nargs="+")
    add_random_adapters(group)
    add_value(group, "--input-len", 128, "prompt tokens of A")
    add_value(group, "--output-len", 256, f"outputs of A, above {SHORT_OUTPUT}")
    add_value(group, "--prefill-len", PREFILL[0], "prompt tokens of P")
    add_value(group, "--num-iters", 2, "runs of each line; the median counts")
    group.add_argument("--seed", type=int, default=0, help="of prompts, adapters and their mix")
    group = parser.add_argument_group("engines")
    group.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="(default: both)")
    add_value(group, "--gpu-memory-utilization", 0.6, "share of the GPU's memory for each engine", share, "SHARE")
    add_value(group, "--precision", "int8", "precision of Sidestream", str, None, choices=("int8", "fp8", "bf16"))
    add_value(group, "--quantization", "fp8", "quantization of vLLM; none: bf16", str, "NAME")
    add_value(group, "--kv-cache-dtype", "fp8", "dtype of vLLM's KV cache", str, "NAME")
    group.add_argument("--vllm-args", type=json_object, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    about = "more arguments of sidestream.LLM"
    group.add_argument("--sidestream-args", type=json_object, default={}, metavar="JSON", help=about)
    about = "the Python that has vLLM (default: this one)"
    group.add_argument("--vllm-python", default=sys.executable, metavar="FILE", help=about)
    add_value(parser, "--output-json", Path("versus-vllm.json"), "file of the figures", Path, "FILE")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be measured, before anything starts."""
    if options.output_len <= SHORT_OUTPUT:
        raise ValueError(f"--output-len {options.output_len} must be above {SHORT_OUTPUT}")
    check_output("--output-json", options.output_json)
    if "vllm" in options.engines:
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            missing = subprocess.run([options.vllm_python, "-c", code], check=False).returncode != 0
        except OSError as error:
            raise ValueError(f"--vllm-python {options.vllm_python}: {error.strerror}; name a Python") from None
        if missing:
            raise ValueError(
                f"{options.vllm_python} has no vLLM; install it there, name another Python with --vllm-python, or "
                "measure one engine with --engines sidestream"
            )


def loads(options: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Return the loads of an engine; `kind`: adapters of the requests."""
    wanted = [("A", count, options.input_len, options.output_len) for count in options.concurrency]
    wanted = [each for each in wanted if "A" in options.workloads]
    if "P" in options.workloads:
        wanted.append(("P", PREFILL[2], options.prefill_len, PREFILL[1]))
    return [
        {
            "workload": name,
            "concurrency": count,
            "input_len": prompt,
            "output_len": output,
            "chosen": pick_adapters(kind, range(options.num_adapters), count, options.seed),
        }
        for name, count, prompt, output in wanted
    ]


def job(
    options: argparse.Namespace,
    engine: str,
    kind: str,
    model: Path,
    dummy: bool,
    adapters: Sequence[str],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the job for `engine_run`; engines differ only in the spelling of the precision."""
    asked, request = loads(options, kind), dict[str, Any]()
    arguments: dict[str, Any] = {
        "model": str(model),
        "max_model_len": max(each["input_len"] + each["output_len"] for each in asked),
        "max_num_seqs": max(each["concurrency"] for each in asked),
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": False,
        "seed": options.seed,
    }
    if dummy:
        arguments["load_format"] = "dummy"
    if kind != "none":
        arguments |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": options.lora_rank}
        arguments["max_cpu_loras"] = len(adapters)
    if engine == "vllm":
        arguments |= {"dtype": "bfloat16", "kv_cache_dtype": options.kv_cache_dtype, "skip_tokenizer_init": True}
        arguments |= {} if options.quantization == "none" else {"quantization": options.quantization}
        if kind != "none" and LlamaConfig.from_dict(config).num_experts:  # PEFT's adapters of stacked experts
            arguments["enable_mixed_moe_lora_format"] = request["is_3d_lora_weight"] = True
        arguments |= {"disable_log_stats": True, **options.vllm_args}
    else:
        arguments |= {"precision": options.precision, **options.sidestream_args}
    return {
        "engine": engine,
        "arguments": arguments,
        "adapters": list(adapters) if kind != "none" else [],
        "request": request,
        "vocabulary": config["vocab_size"],
        "seed": options.seed,
        "repeats": options.num_iters,
        "loads": asked,
    }


def run_job(python: str, work: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Run an engine's process, and return its start and its loads. Raises EngineRunError."""
    place = scratch / "run"  # in a directory of its own: Python would import modules next to the file
    place.mkdir(exist_ok=True)
    file, log = place / "job.json", place / "log.txt"
    file.write_text(json.dumps(work))
    command = [python, shutil.copy(str(engine_run.__file__), place), str(file)]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        lines = [line for line in process.stdout or () if line.startswith(RESULT)]
    found = [json.loads(line.removeprefix(RESULT)) for line in lines]
    if process.returncode or len(found) != len(work["loads"]) + 1:
        lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise EngineRunError(f"{work['engine']} ended early: {lines[-1]}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each load: both engines, and the speed of Sidestream relative to vLLM."""
    from ....compiler.pass_records import columns

    cells: list[tuple[str, ...]] = [
        ("load", "C", "adapters", "vLLM ms/step", "Sidestream", "vLLM tok/s", "Sidestream", "times as fast")
    ]
    for row in rows:
        peer, ours = row.get("vllm"), row.get("sidestream")
        figures = [
            form.format(each[name]) if each and each[name] is not None else "-"
            for name, form in (("ms_per_step", "{:.3f}"), ("tokens_per_second", "{:,.0f}"))
            for each in (peer, ours)
        ]
        times = f"{ours['tokens_per_second'] / peer['tokens_per_second']:.2f}" if peer and ours else "-"
        cells.append((row["workload"], str(row["concurrency"]), row["lora"], *figures, times))
    return columns(cells, right=range(1, len(cells[0])))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run every engine with every choice of adapters; return {"engines": starts and arguments, "rows": figures}."""
    rows: list[dict[str, Any]] = []
    engines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as place:
        scratch = Path(place)
        config, directory = model_fields(options)
        if directory is None:
            write_model(scratch / "model", config, adapters=0, rank=0)
        count = options.num_adapters if set(options.lora) - {"none"} else 0
        written = write_random_adapters(scratch / "adapters", config, options.lora_rank, count, options.seed)
        adapters = list(written.values())
        for kind in options.lora:
            its = [
                {"lora": kind, **{name: load[name] for name in ("workload", "concurrency", "input_len", "output_len")}}
                for load in loads(options, kind)
            ]
            for engine in options.engines:
                work = job(
                    options,
                    engine,
                    kind,
                    (directory or scratch / "model").resolve(),
                    directory is None,
                    adapters,
                    config,
                )
                print(f"{engine}, adapters: {kind} ...", file=sys.stderr, flush=True)
                python = options.vllm_python if engine == "vllm" else sys.executable
                start, *figures = run_job(python, work, scratch)
                shown = {name: value for name, value in work["arguments"].items() if name != "model"}
                engines.append({"engine": engine, "lora": kind, **start, "arguments": shown})
                for row, figure in zip(its, figures, strict=True):
                    row[engine] = figure
            rows += its
    return {"config": config, "engines": engines, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; return 2 for a user's mistake."""
    options = build_parser().parse_args(arguments)
    try:
        check(options)
        found = compare(options)
    except (ValueError, OSError, EngineRunError) as problem:
        print(f"versus_vllm: error: {problem}", file=sys.stderr)
        return 2
    print(table(found["rows"]))
    for each in found["engines"]:
        print(f"{each['engine']} {each['version']}, adapters {each['lora']}: up after {each['start_up_seconds']:.1f} s")
    write_figures(options.output_json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
