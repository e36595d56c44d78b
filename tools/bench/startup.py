"""`sidestream bench startup`: from `LLM(...)` to ready, with cold and with warm caches (workload T).

Each start is a process of its own. Cold: empty caches of programs and kernels. Warm: the same start again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..options.engine import (
    add_command,
    add_compile_options,
    add_run_options,
    add_value,
    at_least,
    check_output,
)
from ..options.environment import write_figures
from ..options.models import add_bench_model
from .latency import build, make_adapters, model_fields

DESCRIPTION = """\
Time the start of the engine, split into capture and passes, loading, kernels and CUDA graphs.

By default the model has the shape of Llama-3.1-8B with random weights; nothing is downloaded. Reading a checkpoint from
disk takes additional time."""

KEEPING_SECONDS = 60.0  # for a start to write its packed adapters to the cache

EXAMPLES = """\
examples:
  sidestream bench startup                    a cold start, then a warm one
  sidestream bench startup demo               the demo model"""


class StartError(Exception):
    """A start failed in its process; the message has the reason."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the bench to the `sidestream bench` parser."""
    parser = add_command(commands, "startup", "time a cold and a warm start", DESCRIPTION, EXAMPLES, run)
    add_bench_model(parser)
    add_value(parser, "--max-num-seqs", 256, "requests at once", dest="concurrency_limit")
    add_value(parser, "--num-adapters", 8, "random adapters, 0 for none", at_least(0))
    add_value(parser, "--lora-rank", 32, "rank of the adapters; alpha is twice the rank", metavar="R")
    add_value(parser, "--output-json", Path("bench-startup.json"), "file of the figures", Path, "FILE")
    parser.add_argument(
        "--once", action="store_true", help="start once, with the caches as they are, and print the figures as JSON"
    )
    add_compile_options(parser)
    add_run_options(parser.add_argument_group("engine"), seed="seed of the weights")


def run(options: argparse.Namespace) -> int:
    """Start twice in processes of their own, print the parts and write the JSON."""
    check_output("--output-json", options.output_json)
    model_fields(options)  # report a wrong model here, not in a process
    if options.once:
        print(json.dumps(start(options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as caches:
        rows = {kind: start_in_a_process(Path(caches)) for kind in ("cold", "warm")}
    parts = list(rows["cold"])
    print(f"{'seconds':<24}{'cold':>10}{'warm':>10}")
    for part in parts:
        print(f"{part.replace('_', ' '):<24}{rows['cold'][part]:>10.2f}{rows['warm'].get(part, 0.0):>10.2f}")
    write_figures(options.output_json, {"workload": "T", "seconds": rows})
    return 0


def start_in_a_process(caches: Path) -> dict[str, float]:
    """Return the figures of one start with the same arguments. Raises StartError with the last line of its output."""
    environment = {
        **os.environ,
        "SIDESTREAM_CACHE": str(caches / "sidestream"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "sidestream.tools.cli", *sys.argv[1:], "--once"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise StartError(f"the start failed: {lines[-1].removeprefix('sidestream: error: ')}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def start(options: argparse.Namespace) -> dict[str, float]:
    """Build the engine, answer one token, and return the seconds of each part and of the whole."""
    import time

    config, directory = model_fields(options)
    options.input_len, options.output_len, options.concurrency = 1024, 1024, [options.concurrency_limit]
    options.lora = ["zipf"] if options.num_adapters else ["none"]
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        adapters = make_adapters(options, config, Path(scratch))
        begin = time.perf_counter()
        llm: Any = build(options, config, directory, adapters)
        total = time.perf_counter() - begin
        first = time.perf_counter()
        llm.generate([[1, 2, 3]], use_tqdm=False)
        answered = time.perf_counter() - first
        if llm.registry.disk_cache is not None:
            llm.registry.disk_cache.jobs.flush(KEEPING_SECONDS)  # a server lives long enough by itself
        return {**llm.seconds, "other": total - sum(llm.seconds.values()), "ready": total, "first_answer": answered}
