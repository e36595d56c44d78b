"""Writes the tables and excerpts of README.md and docs/ from raw measurements, the cost model and the compiler.

python -m sidestream.tools.dev.pages.tables            compare; exit code 1 and a diff where a page is out of date
python -m sidestream.tools.dev.pages.tables --write    rewrite the pages

A table is the text between `<!-- table: NAME -->` and `<!-- end -->`. An excerpt is the fenced block after
`<!-- excerpt: NAME -->`. Each NAME is a key of WRITERS.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ....compiler.cost.hardware import H200
from ....compiler.options import CompileOptions
from ....graphs.config import LlamaConfig
from ....graphs.llama import Llama
from ....graphs.lora import LoraShape
from ....ops.core.kv_layout import PAGE_SIZE
from ....runtime.worker.memory_budget import MemoryDemand
from ...bench.ablation import todays_name
from ...options.models import SHAPES
from ...options.sizing import SizedModel
from ..command_line import dev_parser
from .excerpts import EXCERPTS
from .field_rows import HEAD, field_rows

ROOT = Path(__file__).parents[3]
MEASUREMENTS = ROOT / "docs" / "measurements"
BLOCK = re.compile(
    r"(<!-- (?:table: (?P<table>[^>\n]+?) -->\n|excerpt: (?P<excerpt>[^>\n]+?) -->\n```\w*\n))"
    r"(?P<text>.*?)(?P<end>(?(table)<!-- end -->|```)\n)",
    re.DOTALL,
)
Writers = Mapping[str, Callable[[], str]]


class TableError(ValueError):
    """A page names an unknown table or excerpt, or an excerpt is empty."""


def blocks(page: str) -> dict[str, str]:
    """Return the tables and excerpts of a page's text by name."""
    return {found["table"] or found["excerpt"]: found["text"] for found in BLOCK.finditer(page)}


def rewritten(page: str, writers: Writers) -> str:
    """Return the page's text with each table and excerpt written again. Raises TableError."""

    def replace(block: re.Match[str]) -> str:
        name = block["table"] or block["excerpt"]
        if name not in writers:
            raise TableError(f"unknown table or excerpt {name!r}; known: {', '.join(writers)}")
        text = writers[name]()
        if not text.strip():
            raise TableError(f"the excerpt {name!r} is empty: the code that it shows has moved")
        return f"{block[1]}{text}{block['end']}"

    return BLOCK.sub(replace, page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


# Measured: from the raw output of benches in docs/measurements.


def raw(name: str) -> Any:
    """Return the JSON that a bench wrote."""
    return json.loads((MEASUREMENTS / f"{name}.json").read_text(encoding="utf-8"))


def versus() -> str:
    """Return the same loads on vLLM and on Sidestream, for each GPU that was measured."""
    gpus = ("h200", "h100")
    rows: dict[tuple[bool, bool, int], dict[str, list[str]]] = {}
    for gpu in gpus:
        for row in raw(f"versus_vllm_{gpu}")["rows"]:
            decode, pair = row["workload"] == "A", (row["vllm"], row["sidestream"])
            figures = [f"{x['ms_per_step']:.2f}" if decode else f"{x['tokens_per_second']:,.0f}" for x in pair]
            ratio = f"{pair[1]['tokens_per_second'] / pair[0]['tokens_per_second']:.2f}"
            rows.setdefault((row["lora"] != "none", not decode, row["concurrency"]), {})[gpu] = [*figures, ratio]
    lines = []
    for (lora, prompts_alone, count), cells in sorted(rows.items()):
        load = "prompts alone, tokens/s" if prompts_alone else f"{count} request{'s' * (count > 1)}, ms per step"
        each = (cells.get(gpu, ["-"] * 3) for gpu in gpus)
        lines.append([load, "8, Zipf" if lora else "none", *(cell for three in each for cell in three)])
    heads = [f"{name}, {gpu.upper()}" for gpu in gpus for name in ("vLLM 0.26", "Sidestream", "speedup")]
    return table(["load", "adapters", *heads], lines)


def latency() -> str:
    """Return decode steps by number of requests, without and with adapters."""
    rows = {(row["lora"], row["concurrency"]): row for row in raw("bench_latency_h200")["rows"]}
    lines = []
    for count in sorted({count for _, count in rows}):
        base, mixed = rows["none", count], rows["zipf", count]
        cells = [(f"{x['ms_per_step']:.2f}", f"{x['tokens_per_second']:,.0f}", _floor(x)) for x in (base, mixed)]
        lines.append([str(count), *cells[0], *cells[1], f"{base['ms_per_step'] / mixed['ms_per_step']:.2f}"])
    each = ["ms", "tok/s", "of floor"]
    head = [f"{kind}, {name}" for kind in ("base", "adapters") for name in each]
    return table(["requests", *head, "adapters / base"], lines)


def _floor(row: Mapping[str, Any]) -> str:
    return f"{row['share_of_floor']:.0%}"


FAMILIES = {"Llama-3.1-8B": "", "Qwen2.5-7B": "qwen2.5-7b_", "Qwen3-8B": "qwen3-8b_", "Mistral-7B": "mistral-7b_"}
LOADS = [(count, lora) for count in (1, 64, 256) for lora in ("none", "zipf")]


def families() -> str:
    """Return decode steps of each family's shape, with their share of the floor."""
    lines = []
    for title, infix in FAMILIES.items():
        rows = {(row["concurrency"], row["lora"]): row for row in raw(f"bench_latency_{infix}h200")["rows"]}
        lines.append([title, *(f"{rows[load]['ms_per_step']:.2f} ({_floor(rows[load])})" for load in LOADS)])
    return table(["shape", *(f"{count}{', adapters' * (lora == 'zipf')}" for count, lora in LOADS)], lines)


PROMPTS = {"H200": ("bench_prefill_h200", "bench_throughput_h200"), "H100": ("prompts_h100",)}


def prompts() -> str:
    """Return the throughput of prompts alone (P) and of prompts with answers (B)."""
    lines = []
    for gpu, names in PROMPTS.items():
        found: dict[tuple[str, str, str], list[str]] = {}
        for name in names:
            text = (MEASUREMENTS / f"{name}.txt").read_text(encoding="utf-8").partition("\n== release")[0]
            for row in re.findall(r"^([BP]) +(\d+) (none|zipf) +(\d+) +(\d+) +([\d.]+) +([\d.]+)", text, re.MULTILINE):
                found.setdefault(row[:3], list(row[3:]))
        in_order = sorted(found.items(), key=lambda each: each[0][0] != "P")
        for (load, count, lora), (out, prompt, p50, p99) in in_order:
            what = "2,048-token prompts" if load == "P" else "1,024-token prompts, 128 outputs"
            rate = f"{int(prompt if load == 'P' else out):,} {'prompt' if load == 'P' else 'output'}"
            first = f"{float(p50):.0f} / {float(p99):.0f}"
            lines.append([gpu, f"{count} x {what}", "none" if lora == "none" else "8, Zipf", rate, first])
    return table(["GPU", "load", "adapters", "tokens/s", "first token, p50 / p99 ms"], lines)


def startup() -> str:
    """Return the seconds of a cold and of a warm start."""
    cold, warm = (raw("bench_startup_h200")["seconds"][kind] for kind in ("cold", "warm"))
    return table(["seconds", "cold", "warm"], [[p.replace("_", " "), f"{cold[p]:.1f}", f"{warm[p]:.1f}"] for p in cold])


def speculation() -> str:
    """Return steps with drafts at injected acceptance rates, next to the same run without drafts."""
    lines = []
    for name, loads in (("7", [(1, "none")]), ("3", [(64, "zipf")]), ("auto", [(1, "none"), (64, "zipf")])):
        plain: dict[tuple[int, str], Any] = {}
        for row in raw(f"bench_speculation_{name}_h200")["rows"]:
            load, rate = (row["concurrency"], row["lora"]), row["injected_acceptance"]
            without = plain.setdefault(load, row)
            if load not in loads or (name == "auto" and rate is None):
                continue
            drafts = f"auto: {row['drafts_per_step']:.1f}" if name == "auto" else "0" if rate is None else name
            decode = row["tokens_per_step"] * without["ms_per_step"] / row["ms_per_step"]
            whole = row["tokens_per_second"] / without["tokens_per_second"]
            figures = (row["ms_per_step"], row["tokens_per_step"], decode, whole)
            adapters = "none" if load[1] == "none" else "8, Zipf"
            shown = "" if rate is None else f"{rate:g}"
            lines.append([str(load[0]), adapters, drafts, shown, *(f"{figure:.2f}" for figure in figures)])
    head = ["requests", "adapters", "drafts per request", "acceptance", "ms per step", "tokens per request and step"]
    return table([*head, "decode speedup", "speedup with prompts"], lines)


ABLATION = (
    *("everything on", "no programmatic dependent launch", "without pack_projections", "without fuse_silu_mul"),
    *("without fuse_add_rms_norm", "without fuse_rope_append", "without fuse_quantize", "without fuse_decoder_block"),
    *("LoRA as serial", "LoRA stacks in 16 bits", "KV cache in 16 bits", "everything in 16 bits"),
)


def ablation() -> str:
    """Return microseconds of a decode layer, and in brackets the change from everything on."""
    cells: dict[str, dict[tuple[int, bool], str]] = {}
    for row in raw("bench_ablation_h200")["ablation"]:
        arm, place = todays_name(row["arm"]), (row["tokens"], bool(row["adapters"]))
        added = "" if arm == ABLATION[0] else f" ({row['added_us']:+.1f})"
        cells.setdefault(arm, {})[place] = f"{row['us_per_layer']:.1f}{added}"
    places = sorted(cells[ABLATION[0]])
    head = [f"{tokens}{', adapters' * lora}" for tokens, lora in places]
    return table(["change; requests", *head], [[arm, *(cells[arm].get(p, "") for p in places)] for arm in ABLATION])


# Computed: from compiled programs and the cost model. Models of one and two layers give a layer and the rest.

GB = 1e9
H200_MEMORY = 141 * GB
MEMORY_UTILIZATION = 0.9  # the default of gpu_memory_utilization
REQUESTS, CONTEXT, GPUS, RANK = (1, 64, 256, 1024), 1024, (1, 2, 4, 8), 16
LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "Llama 3.2 1B": SHAPES["llama-3.2-1b"],
    "Llama 3.2 3B": SHAPES["llama-3.2-3b"],
    "Llama 3.1 8B": SHAPES["llama-3.1-8b"],
    "Llama 3.1 70B": SHAPES["llama-3.1-70b"],
}


@cache
def _sized(name: str, world: int = 1, lora: bool = False) -> tuple[SizedModel, MemoryDemand]:
    """Return a model, and its bytes on one of `world` GPUs; with `lora` it has one slot for adapters."""
    config, shape = LlamaConfig.from_dict(LLAMAS[name]), LoraShape(1, RANK) if lora else None
    model = SizedModel(config, shape, CompileOptions(tensor_parallel=world, gather_logits=world == 1))
    return model, model.demand(CONTEXT, 1, 1)


def sizes(names: Iterable[str] = tuple(LLAMAS)[:3]) -> str:
    """Return the disk and GPU memory of a Llama and its adapters, in decimal units."""
    rows = []
    for name in names:
        model, demand = _sized(name, lora=True)
        checkpoint = sum(2 * each.numel() for each in Llama(model.config, None, torch.bfloat16, "meta").parameters())
        sized = [f"{each / GB:.1f} GB" for each in (checkpoint, demand.weights)]
        sized += [f"{each / 1e6:.0f} MB" for each in (demand.page / PAGE_SIZE * 1000, demand.adapters / demand.slots)]
        rows.append([name, *sized])
    head = ["model", "bf16 checkpoint", "weights", "1,000 tokens of KV cache", f"an adapter's slot, rank {RANK}"]
    return table(head, rows)


def parallel(names: Iterable[str] = tuple(LLAMAS)[2:], gpus: Iterable[int] = GPUS) -> str:
    """Return one engine over several GPUs / one engine on each of them, on H200s."""

    def tokens(name: str, world: int) -> float:
        _, demand = _sized(name, world)
        return (H200_MEMORY * MEMORY_UTILIZATION - demand.weights) / demand.page * PAGE_SIZE

    def step(name: str, world: int, requests: int) -> str:
        fits = requests * CONTEXT <= tokens(name, world)
        return f"{1e3 * _sized(name, world)[0].decode_seconds(requests, CONTEXT, 0, H200):.1f}" if fits else "-"

    rows = []
    for name in names:
        for count in gpus:
            weights = [f"{_sized(name, world)[1].weights / GB:.1f}" for world in (count, 1)]
            room = [f"{each / 1e6:.2f}" for each in (tokens(name, count), count * tokens(name, 1))]
            steps = [[step(name, count, each), step(name, 1, max(1, each // count))] for each in REQUESTS]
            rows.append([name, str(count), *(" / ".join(dict.fromkeys(pair)) for pair in (weights, room, *steps))])
    head = ["model", "GPUs", "weights a GPU, GB", "tokens of KV cache, millions"]
    return table([*head, *(f"ms/step, {each:,} request{'s' * (each > 1)}" for each in REQUESTS)], rows)


MEASURED: Writers = {
    "next to vLLM": versus,
    "latency": latency,
    "families": families,
    "prompts": prompts,
    "startup": startup,
    "speculation": speculation,
    "ablation": ablation,
}
WRITERS: Writers = {
    **MEASURED,
    "sizes": sizes,
    "parallel": parallel,
    "fields of HTTP bodies": lambda: table(HEAD, field_rows()),
    **EXCERPTS,
}


def pages() -> list[Path]:
    """Return the pages with a table or an excerpt."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if BLOCK.search(page.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the pages, or rewrite them; return the exit code."""
    parser = dev_parser("pages.tables", __doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    parser.add_argument("pages", nargs="*", type=Path, help="pages (default: all with a table or an excerpt)")
    options = parser.parse_args(arguments)
    stale = False
    for page in options.pages or pages():
        before = page.read_text(encoding="utf-8")
        after = rewritten(before, WRITERS)
        if options.write:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            stale = True
            lines = before.splitlines(True), after.splitlines(True)
            print("".join(difflib.unified_diff(*lines, f"{page.name} as committed", f"{page.name} today")), end="")
    return int(stale)


if __name__ == "__main__":
    raise SystemExit(main())
