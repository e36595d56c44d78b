"""`sidestream plan`: what fits on a GPU, how fast it is, and what it costs."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options.engine import (
    add_command,
    add_compile_options,
    add_lora_options,
    add_model,
    add_option,
    add_value,
    compile_arguments,
    number,
)
from ..options.models import SHAPES, lora_shape, model_config

if TYPE_CHECKING:
    from ...compiler.cost.hardware import Gpu

DESCRIPTION = """\
Estimate what fits on a GPU (weights, adapter slots, KV tokens, requests at once), the time of a step and the tokens per
second at several loads, and the cost of a million tokens. MODEL is a directory, of which config.json is read, or one of
the shapes below. No GPU is needed; docs/sizing.md has the formulas. Times are those of the cost model for the steps;
measure your own with `sidestream bench`."""

LOADS = (1, 8, 32, 64, 128, 256)
MEMORY_GB = {"H100": 80.0, "H200": 141.0}


@dataclass(frozen=True)
class Load:
    """Estimates for a number of requests at once. `output_tokens`: of all, per second, with the time for prompts."""

    requests: int
    step_ms: float
    tokens_each: float
    output_tokens: float
    requests_per_second: float
    gpu_hours: float
    """Hours of the GPU for a million output tokens and the prompts before them."""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    examples = (
        "examples:\n"
        "  sidestream plan llama-3.1-8b --max-loras 40 --max-lora-rank 32\n"
        "  sidestream plan models/llama --max-loras 8 --gpu h100-80 --price 2.5 --prompt-tokens 2000\n\n"
        f"shapes: {', '.join(SHAPES)}"
    )
    usage = "%(prog)s [MODEL] [--max-loras N] [--max-lora-rank R] [--gpu NAME] [options]"
    parser = add_command(commands, "plan", "estimate memory, speed and cost", DESCRIPTION, examples, run, usage)
    add_model(parser, "a Hugging Face directory, or a shape (default: the demo model)")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="h100 or h200, also with its memory in GB: h100-80 (default: this machine's, or an H200)",
    )
    parser.add_argument("--price", type=number("price", 0, 1e6), metavar="P", help="price of the GPU for an hour")
    add_value(parser, "--prompt-tokens", 1024, "tokens of a prompt")
    add_value(parser, "--output-tokens", 128, "tokens of an answer")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    group = parser.add_argument_group("engine")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"):
        add_option(group, name)
    for name in ("kv_host_gb", "kv_disk_gb"):
        add_option(group, name)
    add_compile_options(parser)
    add_lora_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the estimates. Raises CapacityError if the model does not fit."""
    from ...compiler.options import CompileOptions
    from ...ops.core.kv_layout import PAGE_SIZE
    from ...runtime.engine.options import MAX_NUM_SEQS, EngineOptions
    from ...runtime.engine.resolve import DEFAULT_MAX_MODEL_LEN, MAX_BATCHED_TOKENS
    from ...runtime.worker.memory_budget import GIB, plan_pages
    from ..options.sizing import SizedModel

    gpu, total = gpu_and_memory(options.gpu)
    if options.model and options.model not in SHAPES and not Path(options.model).exists() and "/" not in options.model:
        raise ValueError(
            f"MODEL {options.model} is neither a directory nor a shape: {', '.join(SHAPES)}; name one of them"
        )
    options.shape = options.model if options.model in SHAPES else None
    name, options.model = options.model or "the demo model", None if options.shape else options.model
    config = model_config(options)
    lora = lora_shape(options, config)
    model_len = options.max_model_len or min(config.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    sequences = options.max_num_seqs or MAX_NUM_SEQS
    each = options.prompt_tokens + options.output_tokens
    if each > model_len:
        raise ValueError(
            f"--prompt-tokens {options.prompt_tokens} and --output-tokens {options.output_tokens} are {each} tokens, "
            f"but a request has at most {model_len}; lower them or raise --max-model-len"
        )
    model = SizedModel(config, lora, CompileOptions(**compile_arguments(options)))
    batched = max(sequences, options.max_num_batched_tokens or MAX_BATCHED_TOKENS)
    demand = model.demand(model_len, sequences, batched)
    utilization = options.gpu_memory_utilization or EngineOptions().gpu_memory_utilization
    tokens = plan_pages(demand, total, total, utilization, model_len, 1 << 20) * PAGE_SIZE
    at_once = min(sequences, tokens // each)
    slots = 0 if lora is None else lora.slots
    prompt_seconds = model.prompt_seconds(options.prompt_tokens, gpu)
    loads = []
    for requests in sorted({count for count in LOADS if count < at_once} | {at_once}):
        context = options.prompt_tokens + options.output_tokens // 2
        step = model.decode_seconds(requests, context, min(slots, requests), gpu)
        seconds = options.prompt_tokens * prompt_seconds + options.output_tokens * step / requests
        rate = options.output_tokens / seconds
        loads.append(Load(requests, 1e3 * step, 1 / step, rate, 1 / seconds, 1e6 / 3600 / rate))
    memory = {
        "gpu_bytes": total,
        "weights": demand.weights,
        "adapter_slots": demand.adapters,
        "activations": demand.activations,
        "reserve": demand.reserve,
        "kv_token": demand.page // PAGE_SIZE,
    }
    facts = {
        "model": name,
        "gpu": gpu.name,
        "slots": slots,
        "rank": 0 if lora is None else lora.rank,
        "memory": memory,
        "kv_tokens": tokens,
        "kv_host_tokens": int((options.kv_host_gb or 0) * GIB) // demand.page * PAGE_SIZE,
        "kv_disk_tokens": int((options.kv_disk_gb or 0) * GIB) // demand.page * PAGE_SIZE,
        "requests_at_once": at_once,
        "prompt_tokens_per_second": 1 / prompt_seconds,
        "loads": [asdict(load) for load in loads],
    }
    print(json.dumps(facts) if options.json else as_text(facts, loads, options))
    return 0


def gpu_and_memory(name: str | None) -> "tuple[Gpu, int]":
    """Return the figures of a GPU and its bytes, for `h100`, `h100-80`, a driver's name, or None for the default.

    Raises ValueError for an unknown GPU or memory.
    """
    import torch

    from ...compiler.cost.hardware import gpu_here, gpu_named

    if name is None:
        found = gpu_here()
        if torch.cuda.is_available():
            return found, torch.cuda.get_device_properties(0).total_memory
        return found, round(1e9 * MEMORY_GB[found.name])
    chip, dash, size = name.rpartition("-")
    found = gpu_named(chip if dash else name)
    try:
        gigabytes = float(size.upper().removesuffix("GB")) if dash else MEMORY_GB[found.name]
        if not 1 <= gigabytes <= 10_000:
            raise ValueError
    except ValueError:
        raise ValueError(f"--gpu {name}: {size!r} is not a memory in GB; write it such as h100-80") from None
    return found, round(1e9 * gigabytes)


def as_text(facts: dict[str, Any], loads: list[Load], options: argparse.Namespace) -> str:
    """Return the estimates as text."""
    memory, price = facts["memory"], options.price
    rows = [
        ("weights", f"{memory['weights'] / 1e9:.1f} GB"),
        (f"{facts['slots']} adapter slots of rank {facts['rank']}", f"{memory['adapter_slots'] / 1e9:.1f} GB"),
        ("activations of a step", f"{memory['activations'] / 1e9:.1f} GB"),
        ("reserve", f"{memory['reserve'] / 1e9:.1f} GB"),
        ("KV cache", f"{facts['kv_tokens']:,} tokens of {memory['kv_token'] / 1e3:.1f} kB"),
        ("requests at once", f"{facts['requests_at_once']}"),
    ]
    for tier, place in (("host", "in host memory"), ("disk", "on disk")):
        if facts[f"kv_{tier}_tokens"]:
            rows.insert(-1, (f"prefixes {place}", f"{facts[f'kv_{tier}_tokens']:,} tokens"))
    width = max(len(title) for title, _ in rows)
    unit = "GPU-hours" if price is None else "price"
    head = f"requests  ms a step  tokens/s each  output tokens/s  requests/s  {unit} per million tokens"
    lines = [
        f"{facts['model']}, {options.precision}, on an {facts['gpu']} with {memory['gpu_bytes'] / 1e9:.0f} GB",
        "",
        *(f"{title:{width}}  {value}" for title, value in rows),
        "",
        f"Prompts of {options.prompt_tokens} and answers of {options.output_tokens} tokens; prompts alone: "
        f"{facts['prompt_tokens_per_second']:,.0f} tokens/s",
        "",
        head,
    ]
    for load in loads:
        cost = f"{load.gpu_hours:.3f}" if price is None else f"{price * load.gpu_hours:.2f}"
        lines.append(
            f"{load.requests:8}  {load.step_ms:9.2f}  {load.tokens_each:13.0f}  {load.output_tokens:15,.0f}  "
            f"{load.requests_per_second:10.1f}  {cost}"
        )
    return "\n".join([*lines, "", "Output tokens include the time for their prompts. Times are estimates."])
