"""`sidestream bench throughput`: whole requests (workloads B and P).

B(C): C requests of 1024 prompt tokens and 128 outputs start at once: output tokens per second, and the time to each
request's first token. P: 16 requests of 2048 prompt tokens and one output: prompt tokens per second, and the share of
the tensor cores' FP8 peak.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...graphs.config import LlamaConfig
from ..options.engine import (
    add_command,
    add_compile_options,
    add_ranks,
    add_run_options,
    add_value,
    check_output,
)
from ..options.environment import write_figures
from ..options.models import add_bench_model, add_random_adapters, pick_adapters
from .floors import gpu_under
from .latency import build, make_adapters, model_fields, ranks_of

BALANCED = (1024, 128)
PREFILL = (2048, 1, 16)

DESCRIPTION = """\
Measure prompts and answers together (B) and prompts alone (P).

By default the model has the shape of Llama-3.1-8B with random weights, and 8 random adapters of rank 32 on all linear
layers; nothing is downloaded."""

EXAMPLES = """\
examples:
  sidestream bench throughput                                    B at 32 and 128 requests, and P, without adapters and
                                                                 with a Zipf mix
  sidestream bench throughput --workloads P --lora none
  sidestream bench throughput demo --concurrency 2               the demo model, to see the format without a GPU"""


@dataclass(frozen=True)
class Row:
    """One line of the table; figures that a workload or a GPU does not have are 0. Times in milliseconds."""

    workload: str
    concurrency: int
    lora: str
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    share_of_fp8_peak: float


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the bench to the `sidestream bench` parser."""
    parser = add_command(
        commands,
        "throughput",
        "time whole requests: prompts with answers, and prompts alone",
        DESCRIPTION,
        EXAMPLES,
        run,
    )
    add_bench_model(parser)
    parser.add_argument(
        "--workloads", nargs="+", choices=("B", "P"), default=["B", "P"], help="workloads to run (default: both)"
    )
    add_value(parser, "--concurrency", [32, 128], "requests at once in B", metavar="C", nargs="+")
    add_random_adapters(parser)
    add_value(parser, "--scale", 1, "divide prompt and output lengths by N, for a quick look")
    add_value(parser, "--num-iters", 2, "measurements of each line; the median counts")
    add_value(parser, "--output-json", Path("bench-throughput.json"), "file of the figures", Path, "FILE")
    add_compile_options(parser)
    engine = parser.add_argument_group("engine")
    add_ranks(engine)
    add_run_options(engine, seed="seed of prompts, weights and the adapters' mix")


def run(options: argparse.Namespace) -> int:
    """Build the engine once, measure every line, print the table and write the JSON."""
    check_output("--output-json", options.output_json)
    config, directory = model_fields(options)
    jobs = [("B", count, BALANCED[0], BALANCED[1]) for count in options.concurrency] if "B" in options.workloads else []
    if "P" in options.workloads:
        jobs.append(("P", PREFILL[2], PREFILL[0], PREFILL[1]))
    jobs = [
        (name, count, max(prompt // options.scale, 1), max(output // options.scale, 1))
        for name, count, prompt, output in jobs
    ]
    options.input_len, options.output_len = max((job[2:] for job in jobs), key=sum)
    options.concurrency = [job[1] for job in jobs]
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        adapters = make_adapters(options, config, Path(scratch))
        llm = build(options, config, directory, adapters)
        on_gpu, gpu = llm.device.type == "cuda", gpu_under(llm)
        peak = 1e12 * gpu.fp8_tflops if gpu.known_rates else None
        print(
            f"{'load':<5}{'C':>5} "
            f"{'lora':<6}{'out tok/s':>11}{'prompt tok/s':>14}{'TTFT p50':>10}{'p99 ms':>9}{'FP8 peak':>10}"
        )
        rows = []
        for kind in options.lora:
            for name, count, prompt, output in jobs:
                row = measure_row(llm, options, config, name, kind, list(adapters), count, prompt, output, peak)
                rows.append(row)
                share = f"{row.share_of_fp8_peak:>10.0%}" if on_gpu and row.share_of_fp8_peak else f"{'-':>10}"
                print(
                    f"{name:<5}{count:>5} "
                    f"{kind:<6}{row.output_tokens_per_second:>11.0f}{row.prompt_tokens_per_second:>14.0f}"
                    f"{row.ttft_p50_ms:>10.1f}{row.ttft_p99_ms:>9.1f}{share}",
                    flush=True,
                )
        llm.close()
    shown = f"{gpu.fp8_tflops:.0f} TFLOP/s ({gpu.name})" if peak else f"unknown for {gpu.name}"
    if on_gpu:
        print(f"FP8 peak: {shown}")
    else:
        print(f"FP8 peak: none on a CPU; shares in the JSON are of {shown}")
    content = {
        "workloads": "B, P",
        "config": config,
        "rows": [asdict(row) for row in rows],
        "fp8_peak": {"gpu": gpu.name, "flops_per_second": peak, "source": gpu.source},
    }
    write_figures(options.output_json, content)
    return 0


def measure_row(
    llm: Any,
    options: argparse.Namespace,
    config: dict[str, Any],
    name: str,
    kind: str,
    names: Sequence[str],
    count: int,
    prompt: int,
    output: int,
    peak: float | None,
) -> Row:
    """Return the median run after a warm-up. `peak`: FP8 operations per second of the GPU."""
    from ...runtime.api.sampling_params import SamplingParams

    source = random.Random(options.seed)
    prompts = [[source.randrange(config["vocab_size"]) for _ in range(prompt)] for _ in range(count)]
    chosen = pick_adapters(kind, names, count, options.seed)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    runs = []
    for _ in range(options.num_iters + 1):
        for sequence in prompts:  # other tokens each time, so that no prefix is cached
            sequence[0] = source.randrange(config["vocab_size"])
        runs.append(timed(llm, prompts, params, chosen))
    seconds, first = sorted(runs[1:], key=lambda run: run[0])[(options.num_iters - 1) // 2]
    tokens = count * prompt
    return Row(
        name,
        count,
        kind,
        count * output / seconds,
        tokens / seconds,
        1e3 * statistics.median(first),
        1e3 * percentile(first, 0.99),
        prompt_flops(config, count, prompt) / seconds / (peak * ranks_of(options)) if peak and name == "P" else 0.0,
    )


def timed(
    llm: Any, prompts: Sequence[Sequence[int]], params: Any, adapters: Sequence[str | None]
) -> tuple[float, list[float]]:
    """Return (seconds of the whole run, seconds to the first token of each prompt)."""
    first: dict[int, float] = {}
    begin = time.perf_counter()
    for chunk in llm.stream(prompts, params, adapter=list(adapters)):
        if chunk.token_ids:
            first.setdefault(chunk.prompt_index, time.perf_counter() - begin)
    return time.perf_counter() - begin, list(first.values())


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that a `share` (0..1] of them do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def prompt_flops(config: dict[str, Any], count: int, prompt: int) -> float:
    """Return floating-point operations of `count` prompts: two per weight and token, and causal attention.

    Embedding and unused logits are left out.
    """
    base = LlamaConfig.from_dict(config)
    weights = sum(outputs * inputs for outputs, inputs in map(base.stored_shape, base.stored_modules()))
    weights += base.num_sparse_layers * base.num_experts_per_tok * 3 * base.hidden_size * base.expert_intermediate_size
    # QK^T and PV, half of the square each
    attention = base.num_hidden_layers * 2 * base.stored_shape("o_proj")[1] * prompt
    return count * prompt * (2.0 * weights + attention)
