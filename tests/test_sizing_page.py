"""docs/sizing.md: its worked example follows from the engine's own memory plan and from published measurements."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sidestream.compiler.cost.hardware import H200
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.families import EXPERT_TARGETS
from sidestream.graphs.lora import LoraShape
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.adapters.adapter_limits import expert_slot_bytes
from sidestream.runtime.engine.options import MAX_NUM_SEQS
from sidestream.runtime.engine.resolve import DEFAULT_MAX_MODEL_LEN, MAX_BATCHED_TOKENS
from sidestream.runtime.worker.memory_budget import RESERVE_BYTES, MemoryDemand, plan_pages
from sidestream.tools import cli
from sidestream.tools.bench.floors import weight_bytes
from sidestream.tools.options.models import LLAMA_8B, SHAPES
from sidestream.tools.options.sizing import SizedModel

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "sizing.md").read_text()
RANK, UTILIZATION, CONTEXT = 16, 0.9, 1024
GPUS = {"80 GB": 80_000_000_000, "141 GB": 141_000_000_000}
PROMPT, OUTPUT, INTERVAL = 1024, 128, 60  # tokens of a request, seconds between the requests of a user


@cache
def llama_8b() -> MemoryDemand:
    """Return the demand with a single slot and the buffer for copies."""
    model = SizedModel(LlamaConfig.from_dict(LLAMA_8B), LoraShape(1, RANK), CompileOptions())
    return model.demand(DEFAULT_MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_BATCHED_TOKENS)


def tokens(max_loras: int, memory: int) -> int:
    """Return how many tokens of KV cache fit."""
    demand = replace(llama_8b(), adapters=(max_loras + 1) * llama_8b().adapters // 2)
    return plan_pages(demand, memory, memory, UTILIZATION, DEFAULT_MAX_MODEL_LEN, 1 << 20) * PAGE_SIZE


def row(file: str, **wanted: Any) -> dict[str, Any]:
    """Return the row of a measurement with these values."""
    rows = json.loads((DOCS / "measurements" / file).read_text())["rows"]
    (found,) = (each for each in rows if wanted.items() <= each.items())
    return dict(found)


def decode_rate(requests: int, lora: str = "zipf") -> float:
    """Return measured output tokens per second of so many requests at once."""
    return float(row("bench_latency_h200.json", concurrency=requests, lora=lora)["tokens_per_second"])


def prompt_rate() -> float:
    """Return measured prompt tokens per second, with adapters."""
    return float(row("bench_throughput_h200.json", workload="P", lora="zipf")["prompt_tokens_per_second"])


def requests_per_second() -> float:
    """Return the formula of the page for 128 requests at once."""
    return 1 / (PROMPT / prompt_rate() + OUTPUT / decode_rate(128))


def assert_shown(*lines: str) -> None:
    missing = [line for line in lines if line not in PAGE]
    assert not missing, "docs/sizing.md should contain\n" + "\n".join(missing)


def test_the_plan_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    command, _, shown = PAGE.partition("```text\n")
    (line,) = (each.split() for each in command.splitlines() if "sidestream plan" in each)
    assert cli.main(line[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [each for each in shown.partition("\n```")[0].splitlines() if each not in printed] == []


def test_sizes_of_the_model() -> None:
    demand = llama_8b()
    weights, slot, activations, page = demand.weights, demand.adapters // 2, demand.activations, demand.page
    assert_shown(
        f"| weights | {weights / 1e9:.1f} GB |",
        f"| activations of a step | {activations / 1e9:.1f} GB |",
        f"| reserve | {RESERVE_BYTES / 1e9:.1f} GB |",
        f"| an adapter slot, rank {RANK} | {slot / 1e6:.0f} MB |",
        f"| KV cache per token | {page / PAGE_SIZE / 1e3:.1f} kB |",
    )


def test_tokens_that_fit() -> None:
    slot = llama_8b().adapters // 2
    for max_loras in (8, 32, 128, 256):
        cells = [f"{max_loras}", f"{(max_loras + 1) * slot / 1e9:.1f} GB"]
        for memory in GPUS.values():
            fit = tokens(max_loras, memory)
            cells += [f"{fit:,}", f"{fit // CONTEXT:,}"]
        assert_shown(f"| {' | '.join(cells)} |")


def test_mixtures_of_experts() -> None:
    fields = SHAPES["qwen3-30b-a3b"]
    config = LlamaConfig.from_dict(fields)
    assert_shown(f"in int8 ({weight_bytes(fields, 'int8') / 1e9:.1f} GB of weights")
    assert_shown(*(f"| {count} | {weight_bytes(fields, 'int8', tokens=count) / 1e9:.1f} GB |" for count in (1, 8, 64)))
    for rank in (16, 32, 64):
        slot = expert_slot_bytes(LoraShape(1, rank, EXPERT_TARGETS), config, 1)
        assert_shown(f"| {rank} | {slot / 1e6:,.0f} MB |")


def test_rates_and_users() -> None:
    rate = requests_per_second()
    lines = [
        f"| {count} | {decode_rate(count):,.0f} | {decode_rate(count) / count:.0f} |" for count in (8, 64, 128, 256)
    ]
    assert_shown(
        *lines,
        f"For prompts alone: {prompt_rate():,.0f} tokens/s",
        f"1 / ({PROMPT:,} / {prompt_rate():,.0f} + {OUTPUT} / {decode_rate(128):,.0f}) = {rate:.1f} requests/s",
        f"{rate:.1f} x {INTERVAL} x 0.5 = {rate * INTERVAL * 0.5:,.0f} users",
        f"1,000,000 / (3,600 x {rate * OUTPUT:,.0f}) = {1e6 / 3600 / (rate * OUTPUT):.3f} x the price of a GPU-hour",
    )


def test_the_formula_is_close_to_the_measured_rate() -> None:
    measured = row("bench_throughput_h200.json", workload="B", concurrency=128, lora="zipf")["output_tokens_per_second"]
    assert_shown(f"{measured / OUTPUT:.1f} were measured")
    assert abs(requests_per_second() * OUTPUT / measured - 1) < 0.05


def test_estimated_steps_are_close_to_measured_ones() -> None:
    """`sidestream plan` has these; each measured sequence has 272 cached tokens on average."""
    model = SizedModel(LlamaConfig.from_dict(LLAMA_8B), LoraShape(8, 32), CompileOptions())
    for requests in (1, 8, 64, 256):
        measured = row("bench_latency_h200.json", concurrency=requests, lora="zipf")
        estimate = 1e3 * model.decode_seconds(requests, 272, measured["active_adapters"], H200)
        assert abs(estimate / measured["ms_per_step"] - 1) < 0.1
    assert abs(1 / model.prompt_seconds(PROMPT, H200) / prompt_rate() - 1) < 0.2
