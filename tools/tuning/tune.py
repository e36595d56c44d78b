"""`sidestream tune`: time each linear of a model on this GPU, and write the table of the fastest kernels."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compiler.options import DEFAULT_PRECISION
from ..options.engine import add_command, add_value
from ..options.models import SHAPES, shape_fields
from .table import Job, Timing, has_entry, sections, set_entry, show, write

if TYPE_CHECKING:
    from ...ops.linear.kernel_selection import LinearConfig

TOKENS = (16, 32, 64, 128, 256, 512)
DEFAULT_SHAPE = "llama-3.1-8b"
LAYERS = ("qkv", "o", "gate_up", "down", "lm_head", "experts_gate_up", "experts_down")
FEW_TOKENS = (1, 2, 4, 8)
"""Tokens of further entries of experts, which have an entry for 16 pairs and not for 16 tokens."""
DTYPES = ("int8", "fp8")
AS_FAST = 1.03  # this much slower than the fastest counts as equal
GAIN = 0.98  # largest share of the time of two launches for one launch instead of them
SECONDS_EACH = 0.05  # approximate time for compiling (several at a time), checking and timing one configuration

DESCRIPTION = """\
Find the fastest kernels for the linears of a model on this GPU, and write them to a table.

A linear in eight bits (int8 or FP8) runs on one of several kernels, tile sizes and ways to divide its work; the fastest
depends on its shape and on the tokens of a step. A configuration counts only if its results on fresh random data equal
the reference's, and are the same bits twice. It is timed after another kernel and with cold weights, as in a step, in
turns with the others. Of those within 3% of the fastest the most exact one is kept.

The table is readable JSON, to edit and to commit. Shapes without an entry use a heuristic. Entries for other shapes and
for the other dtype are kept; with --missing all existing entries. A linear that was measured in FP8 only runs in int8
like that, if int8 has the kernel. Token counts are powers of two: a step of 100 tokens uses the entry for 128. The
entries of experts are for powers of two of pairs, of a token and one of its experts."""

EXAMPLES = """\
examples:
  sidestream tune --dry-run                            the entries of Llama-3.1-8B's shape; needs no GPU
  sidestream tune                                      measure them (a minute or two) into the package's table
  sidestream tune --dtype fp8                          the same for --precision fp8
  sidestream tune models/my-llama -o my-gpu.json       another model, another file
  sidestream tune qwen3-8b mistral-7b --missing        missing entries of two models
  sidestream tune --layers gate_up down --tokens 256   some entries only
  sidestream tune --in-layers --layers o --tokens 128  choose by whole decode layers with adapters and without"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [MODEL ...] [options]"
    parser = add_command(
        commands,
        "tune",
        "find the fastest kernels for a model's linears on this GPU",
        DESCRIPTION,
        EXAMPLES,
        run,
        usage,
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=[DEFAULT_SHAPE],
        metavar="MODEL",
        help=f"directories with a config.json, or names: {', '.join(SHAPES)} (default: {DEFAULT_SHAPE})",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=LAYERS,
        default=list(LAYERS),
        metavar="NAME",
        help=f"linears to tune: {', '.join(LAYERS)} (default: all)",
    )
    add_value(parser, "--tokens", list(TOKENS), "tokens", metavar="T", nargs="+")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DEFAULT_PRECISION, help="dtype of the operands (default: %(default)s)"
    )
    add_value(parser, "--repeats", 5, "timed replays of a configuration, for the median")
    parser.add_argument(
        "--in-layers", action="store_true", help="choose from the best few by whole decode layers; a minute per entry"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the table to write (default: the package's for this GPU)"
    )
    parser.add_argument("--missing", action="store_true", help="measure only missing entries")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured, and stop")


def run(options: argparse.Namespace) -> int:
    """Measure and write, or list the entries.

    Raises ValueError for a wrong model, and without a GPU unless it is a dry run.
    """
    import torch
    from tqdm import tqdm

    from ...ops.core.device import H200_SMS
    from ...ops.linear import kernel_selection
    from . import layers

    models = {_name(model): _fields(model) for model in options.models}
    there = torch.cuda.is_available()
    device, sms = "", H200_SMS
    if there:
        device = torch.cuda.get_device_name(0)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
    output = options.output or (
        kernel_selection.TABLES / f"{kernel_selection.gpu_slug(device)}.json" if there else kernel_selection.TUNED
    )
    table = json.loads(output.read_text()) if output.exists() else {}
    work = [
        (job, config)
        for job, config in jobs_of(models, options.layers, options.tokens, options.dtype)
        if not (options.missing and has_entry(table, job))
    ]
    if options.dry_run:
        print(plan([job for job, _ in work], sms))
        return 0
    if not there:
        raise ValueError("tune times CUDA kernels, and this machine has no GPU; --dry-run lists what would be measured")
    table = {"device": device, "models": sorted({*table.get("models", ()), *models}), **sections(table)}
    with tqdm(
        total=sum(len(_configs(job, sms)) for job, _ in work),
        desc=f"Tuning {options.dtype}",
        unit="config",
        dynamic_ncols=True,
    ) as bar:
        for job, config in work:
            bar.set_postfix_str(f"{job.layer} x {job.rows}")
            best, fused, measured = measure(job, sms, options.repeats, bar.update, bar.write)
            if options.in_layers and job.layer != "lm_head" and not job.experts:
                bench = layers.LayerBench(config, job.dtype)
                kept = layers.best_in_layers(bench, job, layers.finalists(measured, job, sms), bar.write)
                set_entry(table, job.op, job, kept)
                bar.write(f"{job.layer:>8} [{job.n}, {job.k}] x {job.rows:<4} kept: {show(kept)}")
                write(output, table)
                continue
            set_entry(table, job.op, job, best.config)
            line = f"{job.layer:>8} [{job.n}, {job.k}] x {job.rows:<4} {best.us:8.2f} us  {show(best.config)}"
            if job.layer in ("gate_up", "experts_gate_up"):
                set_entry(table, f"{job.op}_silu_mul", job, fused.config if fused is not None else None)
                line += "" if fused is None else f"; with SiLU {fused.us:.2f} us  {show(fused.config)}"
            bar.write(line)
            write(output, table)
    print(f"wrote {output}")
    return 0


def _name(model: str) -> str:
    """Return a model's name in the table: its directory's, or the shape's."""
    return model if model in SHAPES else Path(model).resolve().name


def _fields(model: str) -> dict[str, Any]:
    """Return the fields of a model's config.json."""
    if model not in SHAPES and not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"{model} is not a model directory: it has no config.json; give a directory, or one of {', '.join(SHAPES)}"
        )
    return shape_fields(model)


def jobs_of(
    models: dict[str, dict[str, Any]], layers: list[str], tokens: list[int], dtype: str
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Return the entries of several models, each shape once, with the fields of the first model that has it."""
    seen: set[tuple[str, int, int, int]] = set()
    for config in models.values():
        for job in jobs(config, layers, tokens, dtype):
            place = job.op, job.n, job.k, job.rows
            if place not in seen:
                seen.add(place)
                yield job, config


def jobs(config: dict[str, Any], layers: list[str], tokens: list[int], dtype: str = DEFAULT_PRECISION) -> Iterator[Job]:
    """Return the entries of a model; counts of tokens and pairs are rounded up to those of the table."""
    from ...graphs.config import LlamaConfig
    from ...ops.linear.kernel_selection import padded_tokens

    c = LlamaConfig.from_dict(config)
    heads = c.num_attention_heads * c.head_dim
    shapes = {
        "qkv": (heads + 2 * c.num_key_value_heads * c.head_dim, c.hidden_size),
        "o": (c.hidden_size, heads),
        "gate_up": (2 * c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
        "lm_head": (c.vocab_size, c.hidden_size),
        "experts_gate_up": (2 * c.expert_intermediate_size, c.hidden_size),
        "experts_down": (c.hidden_size, c.expert_intermediate_size),
    }
    experts_only, top_k = c.num_sparse_layers == c.num_hidden_layers, c.num_experts_per_tok
    counts = sorted({padded_tokens(count) for count in tokens})
    few = FEW_TOKENS if counts[:1] == [padded_tokens(1)] else ()
    for layer in layers:
        if layer.startswith("experts_"):
            if c.num_sparse_layers:
                for rows in sorted({padded_tokens(count * top_k) for count in (*few, *counts)}):
                    yield Job(layer, *shapes[layer], max(1, rows // top_k), dtype, c.num_experts, top_k)
        elif not (experts_only and layer in ("gate_up", "down")):
            for count in counts:
                yield Job(layer, *shapes[layer], count, dtype)


def linear_configs(job: Job, sms: int) -> "list[LinearConfig]":
    """Return the jobs of `linear_8bit`."""
    from ...ops.linear.kernel_selection import candidates

    return candidates(job.tokens, job.n, job.k, sms, int8=job.int8)


def activation_configs(job: Job, sms: int) -> "list[LinearConfig]":
    """Return the jobs of `linear_8bit_silu_mul`; few tokens keep two launches."""
    from ...ops.linear.kernel_selection import wide_candidates

    if job.layer != "gate_up" or job.tokens <= 64:
        return []
    found = wide_candidates(job.tokens, job.n, sms, activate=True)
    return [config for config in found if not (job.int8 and config.promote)]  # sums of int8 are exact


def _configs(job: Job, sms: int) -> "list[LinearConfig]":
    if job.experts:
        from .grouped import grouped_configs

        return grouped_configs(job) * (2 if job.layer == "experts_gate_up" else 1)
    return [*linear_configs(job, sms), *activation_configs(job, sms)]


def plan(work: list[Job], sms: int) -> str:
    """Return one line for each entry to measure."""
    counts = [len(_configs(job, sms)) for job in work]
    lines = [
        f"{job.layer:>8}  [{job.n}, {job.k}] x {job.rows:<4} {count:>3} configurations"
        for job, count in zip(work, counts, strict=True)
    ]
    minutes = max(1, round(sum(counts) * SECONDS_EACH / 60))
    time = f"about {minutes} minute{'s' if minutes > 1 else ''} on a GPU of {sms} SMs"
    return "\n".join(
        [
            *lines,
            f"{sum(counts)} configurations in {len(work)} entries of "
            f"{' and '.join(sorted({job.dtype for job in work}))}, {time}",
        ]
    )


def choose(measured: list[Timing]) -> Timing:
    """Return the most exact configuration within 3% of the fastest."""
    fastest = min(timing.us for timing in measured)
    return min(
        (timing for timing in measured if timing.us <= AS_FAST * fastest),
        key=lambda timing: (round(timing.error, 4), timing.us),
    )


def measure(
    job: Job, sms: int, repeats: int, advance: Callable[[], Any], report: Callable[[str], Any]
) -> tuple[Timing, Timing | None, list[Timing]]:
    """Return (best configuration of the linear, that of the linear with SiLU * mul, all right ones of the linear).

    The second is None unless it is faster than the linear and `silu_mul_quant`; for experts it is always used. Raises
    ValueError if no configuration gave right results.
    """
    from ...compiler.options import torch_dtype
    from .bench import Bench
    from .grouped import GroupedBench, grouped_configs

    if job.experts:
        grouped = GroupedBench(job, repeats)
        measured = grouped.timings(grouped_configs(job), False, advance, report)
    else:
        bench = Bench(job.n, job.k, job.tokens, repeats, torch_dtype(job.dtype))
        measured = bench.linear(linear_configs(job, sms), sms, advance, report)
    if not measured:
        raise ValueError(
            f"no configuration of {job.layer} [{job.n}, {job.k}] in {job.dtype} gave right results for {job.tokens} "
            "tokens"
        )
    best, fused = choose(measured), activation_configs(job, sms)
    if job.layer == "experts_gate_up":
        activated = grouped.timings(grouped_configs(job), True, advance, report)
        return best, choose(activated) if activated else None, measured
    if not fused:
        return best, None, measured
    activations, separate = bench.activation(fused, best.config, sms, advance, report)
    gains = activations and choose(activations).us <= GAIN * separate
    return best, choose(activations) if gains else None, measured
