"""Keeps the tables of docs/performance.md and of the README true: makes each from the raw output in docs/measurements.

python -m sidestream.tools.dev.pages.performance            exit code 1 and a diff when a table is not what was measured
python -m sidestream.tools.dev.pages.performance --write    put the measured tables in
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...bench.ablation import todays_name
from .excerpts import Excerpts, keep_true

ROOT = Path(__file__).parents[3]
MEASUREMENTS = ROOT / "docs" / "measurements"


def raw(name: str) -> Any:
    """The JSON that a bench wrote."""
    return json.loads((MEASUREMENTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def latency(name: str = "bench_latency_h200") -> str:
    """Workload A: a line for each C, base next to adapters."""
    rows = {(row["lora"], row["concurrency"]): row for row in raw(name)["rows"]}
    lines = []
    for count in sorted({count for _, count in rows}):
        base, mixed = rows["none", count], rows["zipf", count]
        cells = [
            cell
            for row in (base, mixed)
            for cell in (
                f"{row['ms_per_step']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['share_of_floor']:.0%}",
            )
        ]
        lines.append([str(count), *cells, f"{base['ms_per_step'] / mixed['ms_per_step']:.2f}"])
    return table(
        [
            "requests at once",
            "base, ms",
            "tok/s",
            "of floor",
            "with adapters, ms",
            "tok/s",
            "of floor",
            "with / without",
        ],
        lines,
    )


FAMILIES = {"Llama-3.1-8B": "", "Qwen2.5-7B": "qwen2.5-7b_", "Qwen3-8B": "qwen3-8b_", "Mistral-7B": "mistral-7b_"}


def families() -> str:
    """Workload A at 1, 64 and 256 requests with each family's shape."""
    lines = []
    for title, infix in FAMILIES.items():
        rows = {(row["lora"], row["concurrency"]): row for row in raw(f"bench_latency_{infix}h200")["rows"]}
        cells = [
            (rows[lora, count]["ms_per_step"], rows[lora, count]) for count in (1, 64, 256) for lora in ("none", "zipf")
        ]
        lines.append([title, *(f"{ms:.2f} ({row['share_of_floor']:.0%})" for ms, row in cells)])
    loads = [
        "1 request, ms",
        "with an adapter",
        "64 requests, ms",
        "with adapters",
        "256 requests, ms",
        "with adapters",
    ]
    return table(["shape", *loads], lines)


SPECULATION = ("7", "3", "auto", "auto_8")


def speculation() -> str:
    """Steps with drafts, at injected rates of acceptance; each table of a bench next to its own lines without."""
    lines = []
    for name in SPECULATION:
        plain: dict[tuple[str, int], Any] = {}
        for row in raw(f"bench_speculation_{name}_h200")["rows"]:
            injected, load = row["injected_acceptance"], (row["lora"], row["concurrency"])
            if injected is None:
                plain[load] = row
            without = plain[load]
            of = "base" if row["lora"] == "none" else "adapters" if row["concurrency"] > 1 else "an adapter"
            chosen = f"auto: {row['drafts_per_step']:.1f}" if row["drafts"] == "auto" else str(row["drafts"])
            decoding = row["tokens_per_step"] * without["ms_per_step"] / row["ms_per_step"]
            lines.append(
                [
                    str(row["concurrency"]),
                    of,
                    *(("none", "") if injected is None else (chosen, f"{injected:g}")),
                    f"{row['ms_per_step']:.2f}",
                    f"{row['tokens_per_step']:.2f}",
                    f"{decoding:.2f}",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['tokens_per_second'] / without['tokens_per_second']:.2f}",
                ]
            )
    head = [
        "requests at once",
        "of",
        "drafts",
        "right with probability",
        "ms a step",
        "tokens a step",
        "times, decoding",
        "tok/s with prompts",
        "times, with prompts",
    ]
    return table(head, lines)


def versus() -> str:
    """The same loads on vLLM and on Sidestream: milliseconds a step of decode, tokens per second of prompts."""
    lines = []
    for row in raw("versus_vllm_h200")["rows"]:
        peer, ours = row["vllm"], row["sidestream"]
        decodes = row["workload"] == "A"
        lines.append(
            [
                f"{row['concurrency']} that decode, ms a step" if decodes else "prompts alone, tokens/s",
                "none" if row["lora"] == "none" else f"8, {row['lora'].capitalize()}",
                *(
                    f"{each['ms_per_step']:.2f}" if decodes else f"{each['tokens_per_second']:,.0f}"
                    for each in (peer, ours)
                ),
                f"{ours['tokens_per_second'] / peer['tokens_per_second']:.2f}",
            ]
        )
    return table(["requests at once", "adapters", "vLLM 0.26", "Sidestream", "times as fast"], lines)


def prefill() -> str:
    """Workload P, prompts alone."""
    lines = []
    for row in raw("bench_prefill_h200")["rows"]:
        ttft = f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}"
        lines.append(
            [
                "none" if row["lora"] == "none" else "8, Zipf",
                f"{row['prompt_tokens_per_second']:,.0f}",
                f"{row['share_of_fp8_peak']:.0%}",
                ttft,
            ]
        )
    return table(["adapters", "prompt tokens/s", "of the FP8 peak", "first token, p50 / p99 ms"], lines)


def balanced() -> str:
    """Workload B, prompts and answers."""
    rows = [row for row in raw("bench_throughput_h200")["rows"] if row["workload"] == "B"]
    lines = []
    for row in sorted(rows, key=lambda row: (row["concurrency"], row["lora"] != "none")):
        ttft = f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}"
        lines.append(
            [
                str(row["concurrency"]),
                "none" if row["lora"] == "none" else "8, Zipf",
                f"{row['output_tokens_per_second']:,.0f}",
                ttft,
            ]
        )
    return table(["requests at once", "adapters", "output tokens/s", "first token, p50 / p99 ms"], lines)


def attention() -> str:
    """The share of the memory's bandwidth (decode) and the rate (prefill) of attention alone."""
    rows = raw("bench_attention_h200")["attention"]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    shapes: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        rate = (
            f"{row['us']:.1f} us, {row['share']:.0%}"
            if row["kind"] == "decode"
            else f"{row['us']:.0f} us, {row['rate']:.0f} TFLOP/s"
        )
        shapes.setdefault((row["kind"], row["shape"]), {})[row["cache"]] = rate
    return table(
        ["attention", *caches],
        [[f"{kind} {shape}", *(cells.get(cache, "") for cache in caches)] for (kind, shape), cells in shapes.items()],
    )


def fp8_latency() -> str:
    """The same with weights, activations and cache in e4m3, adapters in 16 bits."""
    return latency("bench_latency_fp8_h200")


def layer() -> str:
    """A decode layer without adapters, and with LoRA lowered as the passes choose and by launches on the side stream
    alone.
    """
    lowered: dict[int, dict[str, float]] = {}
    for row in raw("bench_layer_int8_h200")["rows"]:
        lowered.setdefault(row["tokens"], {})[row["variant"]] = row["us_per_layer"]
    names = ("none", "auto", "side_stream")
    return table(
        ["requests at once", "no adapters, us", "LoRA as chosen, us", "LoRA on the side stream alone, us"],
        [[str(tokens), *(f"{times[name]:.1f}" for name in names)] for tokens, times in sorted(lowered.items())],
    )


Place = tuple[int, bool]  # requests at once, whether with adapters


def ablation() -> str:
    """What each optimisation is worth: microseconds that a layer takes, and takes more without it; a column for each
    number of requests.
    """
    arms: dict[str, dict[Place, str]] = {}
    rows = raw("bench_ablation_h200")["ablation"]
    for row in rows:
        added = "" if row["arm"] == rows[0]["arm"] else f" ({row['added_us']:+.1f})"
        arms.setdefault(todays_name(row["arm"]), {})[row["tokens"], bool(row["adapters"])] = (
            f"{row['us_per_layer']:.1f}{added}"
        )
    columns = sorted({place for cells in arms.values() for place in cells})
    head = [f"{tokens} requests, {'adapters' if lora else 'base'}" for tokens, lora in columns]
    return table(
        ["turned off or exchanged", *head],
        [[arm, *(cells.get(place, "") for place in columns)] for arm, cells in arms.items()],
    )


def startup() -> str:
    """Seconds of a cold and of a warm start."""
    rows = raw("bench_startup_h200")["seconds"]
    return table(
        ["seconds", "cold", "warm"],
        [[part.replace("_", " "), f"{rows['cold'][part]:.1f}", f"{rows['warm'][part]:.1f}"] for part in rows["cold"]],
    )


def steps() -> str:
    """Where a decode layer's time goes: microseconds that each op adds to its lane."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    columns = []
    for result in raw("steps_h200")["results"]:
        name = re.fullmatch(r"decode_t(\d+)_.*_(lora|base)", result["program"])
        if name is None:
            raise ValueError(f"steps_h200.json: {result['program']!r} is no decode step")
        columns.append(f"{name[1]}, {'adapters' if name[2] == 'lora' else 'base'}")
        layers = max(row["count"] for row in result["rows"] if row["op"].startswith(("rope_append", "paged_attention")))
        for row in result["rows"]:
            if row["count"] >= layers - 1:  # what a step has once is no layer's
                found.setdefault((row["op"], row["lane"]), {})[columns[-1]] = f"{row['measured'] / layers:.1f}"
    rows = sorted(found.items(), key=lambda entry: entry[0][1] != "main")
    lines = [[op, lane, *(cells.get(column, "") for column in columns)] for (op, lane), cells in rows]
    return table(["us of a layer; requests at once", "lane", *columns], lines)


def kernels() -> str:
    """Steps of a layer of Llama-3.1-8B's shape: as captured, and as the default's programs have them."""
    import torch

    from ....compiler.api import compile_model
    from ....compiler.inspect.explain import describe_pass, explain_program
    from ....compiler.program.program import Bucket
    from ....graphs.config import LlamaConfig
    from ....graphs.llama import Llama
    from ....graphs.lora import LoraShape
    from ...options.models import LLAMA_8B

    models, captured = {}, {}
    for lora in (None, LoraShape(8, 32)):
        for layers in (2, 3):
            config = LlamaConfig.from_dict({**LLAMA_8B, "vocab_size": 4096, "num_hidden_layers": layers})
            models[lora is not None] = compile_model(Llama(config, lora, torch.bfloat16, "meta"), text=False)
            captured[lora is not None, layers] = describe_pass(models[lora is not None].records[0])["kernels_before"]
    rows = [["ATen calls, as captured", *(str(captured[lora, 3] - captured[lora, 2]) for lora in (False, True)), ""]]
    for tokens in (1, 8, 32, 64, 128, 256, 8192):
        sequences = min(tokens, 256)
        lanes = [
            explain_program(
                models[lora].program(Bucket(tokens, sequences, sequences * 32, 32, decode=tokens <= 256, lora=lora))
            )["kernels_of_a_layer"]
            for lora in (False, True)
        ]
        what = f"{tokens} requests that decode" if tokens <= 256 else f"prompts of {tokens:,} tokens"
        rows.append([what, str(lanes[0]["main"]), str(lanes[1]["main"]), str(lanes[1]["side"])])
    return table(["a layer's steps", "no adapters", "with adapters, main lane", "side lane"], rows)


TABLES: Excerpts = {
    "next to vLLM": versus,
    "latency": latency,
    "latency in e4m3": fp8_latency,
    "families": families,
    "speculation": speculation,
    "layer": layer,
    "prefill": prefill,
    "balanced": balanced,
    "startup": startup,
    "attention": attention,
    "ablation": ablation,
    "kernels": kernels,
    "steps": steps,
}
PAGES = {ROOT / page: TABLES for page in ("docs/performance.md", "docs/speculation.md", "README.md")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    return keep_true("python -m sidestream.tools.dev.pages.performance", str(__doc__), PAGES, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
