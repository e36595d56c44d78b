"""Compare the cost model's estimate for each arm of the ablation with bench_ablation_h200.json.

The docs' table and the test of the model's error use it. Each arm's graph is compiled with one and with two layers on
the meta device, and their difference is a layer. No GPU is needed.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from sidestream.compiler.build_program import build_program
from sidestream.compiler.cost.bytes_and_flops import Assumptions
from sidestream.compiler.cost.estimate import estimate, total_seconds
from sidestream.compiler.graph.repeated_layers import capture_model
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pass_records import columns
from sidestream.compiler.pipeline import PASSES, optimize
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.tools.bench.ablation import Arm, Row, arms, todays_name
from sidestream.tools.bench.layer import CONTEXT, VOCABULARY
from sidestream.tools.options.models import LLAMA_8B

MEASURED = Path(__file__).parents[2] / "docs" / "measurements" / "bench_ablation_h200.json"
DEPTHS = (1, 2)
LORA = LoraShape(8, 32)
RELATIVE, ABSOLUTE = 0.15, 2.0  # allowed error of an estimated change: the larger of both, relative or in us per layer
Layer = Callable[[int, int], float]  # (sequences, adapters in the batch; 0: the program without LoRA) -> us


@dataclass(frozen=True)
class Change:
    """An arm at one size, in microseconds per layer; both changes are relative to the arm without changes."""

    arm: str
    tokens: int
    adapters: int
    measured: float
    estimated: float
    measured_change: float
    estimated_change: float

    @property
    def place(self) -> tuple[str, int, bool]:
        """Return the arm, the number of sequences, and whether there are adapters."""
        return self.arm, self.tokens, bool(self.adapters)

    @property
    def error(self) -> float:
        """Return the estimated minus the measured change in microseconds per layer."""
        return self.estimated_change - self.measured_change

    @property
    def within(self) -> bool:
        """Return whether the estimate is within the published bound."""
        return abs(self.error) <= max(ABSOLUTE, RELATIVE * abs(self.measured_change))


def measured_rows(path: Path = MEASURED) -> list[Row]:
    """Return the rows of a file of `sidestream bench latency --ablate`."""
    return [Row(**row | {"arm": todays_name(row["arm"])}) for row in json.loads(path.read_text())["ablation"]]


@cache
def changes() -> tuple[Change, ...]:
    """Return every measured arm that the present options can express."""
    measured: dict[str, list[Row]] = {}
    for row in measured_rows():
        measured.setdefault(row.arm, []).append(row)
    estimates = _Estimates()
    whole: dict[tuple[int, int], tuple[float, float]] = {}
    return tuple(
        change for arm in arms() for change in _of_arm(arm, measured.get(arm.name, []), estimates.layer(arm), whole)
    )


def _of_arm(
    arm: Arm, rows: Sequence[Row], layer: Layer, whole: dict[tuple[int, int], tuple[float, float]]
) -> Iterator[Change]:
    for row in rows:
        us = layer(row.tokens, row.adapters)
        measured, estimated = whole.setdefault((row.tokens, row.adapters), (row.us_per_layer, us))
        yield Change(
            arm.name, row.tokens, row.adapters, row.us_per_layer, us, row.us_per_layer - measured, us - estimated
        )


class _Estimates:
    """Layers of Llama-3.1-8B's shape under any options; each depth is captured once."""

    def __init__(self) -> None:
        self.captured = {}
        for depth in DEPTHS:
            config = LlamaConfig.from_dict({**LLAMA_8B, "vocab_size": VOCABULARY, "num_hidden_layers": depth})
            model = Llama(config, LORA, torch.bfloat16, device="meta")
            names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
            self.captured[depth] = capture_model(model), names
        self.graphs: dict[CompileOptions, dict[int, torch.fx.GraphModule]] = {}

    def layer(self, arm: Arm) -> Layer:
        """Return the function that estimates a layer of this arm."""
        options = replace(CompileOptions(), **arm.change)
        graphs = self._graphs(options)

        def us(tokens: int, adapters: int) -> float:
            blocks = CONTEXT // PAGE_SIZE + 1
            bucket = Bucket(tokens, tokens, tokens * blocks, blocks, decode=True, lora=bool(adapters))
            few, more = (
                total_seconds(estimate(build_program(graph, bucket, options), Assumptions(CONTEXT, adapters or None)))
                for graph in graphs.values()
            )
            return 1e6 * (more - few) / (DEPTHS[1] - DEPTHS[0])

        return us

    def _graphs(self, options: CompileOptions) -> dict[int, torch.fx.GraphModule]:
        """Return both graphs after the passes; programs with and without PDL share them."""
        shared = {each.name for each in PASSES}
        key = replace(options, pdl=True, disable=tuple(name for name in options.disable if name in shared))
        if key not in self.graphs:
            self.graphs[key] = {
                depth: optimize(captured.copy(), key, names, text=False).captured.graph_module
                for depth, (captured, names) in self.captured.items()
            }
        return self.graphs[key]


def table() -> str:
    """Return measured and estimated microseconds of a layer and their changes; a star marks a missed estimate."""
    sizes = sorted({change.tokens for change in changes()})
    found = {change.place: change for change in changes()}
    rows = [
        ("arm", "LoRA", *(f"{size}: measured" if part else f"{size}: estimated" for size in sizes for part in (1, 0)))
    ]
    for arm in arms():
        for lora in (False, True):
            if (arm.name, sizes[0], lora) not in found:
                continue
            cells = []
            for size in sizes:
                change = found[arm.name, size, lora]
                star = "" if change.within else "*"
                cells += [
                    f"{change.measured:.1f} ({change.measured_change:+.1f})",
                    f"{change.estimated:.1f} ({change.estimated_change:+.1f}){star or ' '}",
                ]
            rows.append((arm.name, "yes" if lora else "", *cells))
    missed = sum(not change.within for change in changes())
    return columns(rows, right=range(2, 2 + 2 * len(sizes))) + (
        f"\n{len(changes()) - missed} of {len(changes())} changes within {RELATIVE:.0%} or {ABSOLUTE:.0f} us a layer\n"
    )
