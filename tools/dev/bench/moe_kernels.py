"""Check and time every kernel of a mixture of experts, next to the time for its bytes.

    python -m sidestream.tools.dev.bench.moe_kernels                     # Qwen3-30B-A3B, int8, 8 adapters of rank 16
    python -m sidestream.tools.dev.bench.moe_kernels --tokens 1 64 -o moe.json
    python -m sidestream.tools.dev.bench.moe_kernels --dry-run           # cases and bytes, without a GPU

Rows are printed as soon as they are measured. Experts and adapters of the tokens are random. Launches of several
routings take turns in a CUDA graph, so that weights come from memory and not from the L2 cache; launches do not overlap
(no programmatic dependent launch). A kernel is checked against its reference and must give the same bits twice.
`sidestream tune` measures configurations of the linears.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....compiler.cost.hardware import H200, Gpu, gpu_of
from ....ops.core.registry import Op, as_outputs
from ....ops.elementwise.combine_rms_norm import combine_add_rms_norm_quant
from ....ops.elementwise.silu_mul import silu_mul_quant
from ....ops.lora.expand import lora_expand
from ....ops.lora.plan import lora_splits
from ....ops.lora.shrink import lora_shrink
from ....ops.moe.combine import moe_combine
from ....ops.moe.expert_lora import pair_tile
from ....ops.moe.grouped_linear import expert_tile, grouped_linear_8bit
from ....ops.moe.grouped_linear_8bit_silu_mul import grouped_linear_8bit_silu_mul
from ....ops.moe.plan import expert_groups, group_plan
from ....ops.moe.route import moe_route
from ...tuning.grouped import MAX_ERROR, ROUTINGS, distinct_experts, launch_error, random_experts, random_rows, time_us

BF16, INT32, FP32 = torch.bfloat16, torch.int32, torch.float32


@dataclass(frozen=True)
class Shape:
    """A model's sparse layer; slots are those of adapters of `rank`."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8
    slots: int = 8
    rank: int = 16


SHAPES = {"qwen3-30b-a3b": Shape(), "mixtral-8x7b": Shape(4096, 14336, 8, 2)}


@dataclass(frozen=True)
class Case:
    """Launches of one op with different routings; `read` bytes are read and written by one of them."""

    name: str
    op: Op
    args: list[tuple[Any, ...]]
    read: float
    operations: float = 0.0


class Layer:
    """Random weights and stacks of one layer."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        experts, hidden, width, slots, rank = (
            shape.experts, shape.hidden, shape.width, shape.slots, shape.rank,
        )  # fmt: skip
        groups = slots * experts
        self.router = self.normal(experts, hidden) / hidden**0.5
        self.gate_up, self.down = self.rows(experts, 2 * width, hidden), self.rows(experts, hidden, width)
        self.stacks = [
            (self.rows(groups, ranks, k), self.rows(groups, n, rank), slices)
            for ranks, k, n, slices in (
                (2 * rank, hidden, 2 * width, [width, width]),
                (rank, width, hidden, [hidden]),
            )
        ]

    def normal(self, *shape: int) -> torch.Tensor:
        """Return values of a normal distribution in bf16."""
        return torch.randn(*shape, dtype=BF16, device=self.device)

    def rows(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows in eight bits and their scales."""
        return random_rows(shape, self.dtype, self.device)

    def cases(self, tokens: int) -> Iterator[Case]:
        """Yield the kernels of a layer in the order of a step, for `tokens` tokens."""
        shape, top_k, pairs = self.shape, self.shape.top_k, tokens * self.shape.top_k
        hidden, width, experts = shape.hidden, shape.width, shape.experts
        tile, groups = expert_tile(pairs, experts), shape.slots * experts
        lora_tile = pair_tile(pairs, groups)
        routings = [self.experts_of(tokens) for _ in range(ROUTINGS)]
        adapters = torch.randint(0, shape.slots, (tokens,), dtype=INT32, device=self.device)
        slots = torch.arange(tokens, dtype=INT32, device=self.device)
        x, z = self.normal(tokens, hidden), self.normal(pairs, hidden)
        weights = torch.full((tokens, top_k), 1 / top_k, dtype=FP32, device=self.device)
        (q, scale), (h, h_scale) = self.rows(tokens, hidden), self.rows(pairs, width)
        scale, h_scale = scale * hidden**0.5, h_scale * width**0.5
        used = distinct_experts(experts, top_k, tokens)
        yield Case("route", moe_route, [(x, self.router, None, slots, top_k, True)], x.nbytes + self.router.nbytes)
        yield Case("plan", group_plan, [(each.view(-1), experts, tile) for each in routings], 8.0 * pairs)
        plans = [(*self.plan(each.view(-1), experts, tile), tile) for each in routings]

        def linear(name: str, op: Op, given: tuple[Any, ...], by_row: int, out: int, between: tuple[Any, ...]) -> Case:
            args = [(*given, *between, *plan, by_row, BF16) for plan in plans]
            n, k = given[2].shape[1:]
            return Case(name, op, args, used * n * (k + 4) + given[0].nbytes + 2.0 * pairs * out, 2.0 * pairs * n * k)

        of_gate_up, of_down = (q, scale, *self.gate_up), (h, h_scale, *self.down)
        yield linear("gate_up + silu", grouped_linear_8bit_silu_mul, of_gate_up, top_k, width, ())
        yield linear("gate_up", grouped_linear_8bit, of_gate_up, top_k, 2 * width, (None,))
        yield Case(
            "silu", silu_mul_quant, [(self.normal(pairs, 2 * width), None, False, self.dtype)], 5.0 * pairs * width
        )
        yield linear("down", grouped_linear_8bit, of_down, 1, hidden, (None,))
        yield Case("combine", moe_combine, [(z, weights)], z.nbytes + x.nbytes)
        norm = (z, weights, None, x, self.normal(hidden), 1e-6, False, self.dtype)
        yield Case("combine + norm", combine_add_rms_norm_quant, [norm], z.nbytes + 2.5 * x.nbytes)
        yield Case("LoRA groups", expert_groups, [(adapters, each, experts) for each in routings], 8.0 * pairs)
        sorted_pairs = [expert_groups.overload(adapters, each, experts) for each in routings]
        yield Case("LoRA plan", group_plan, [(each, groups, lora_tile) for each in sorted_pairs], 8.0 * pairs)
        lora_plans = [(*self.plan(each, groups, lora_tile), lora_tile) for each in sorted_pairs]
        active = min(shape.slots, tokens)
        stacks = active * distinct_experts(experts, top_k, tokens / active)
        for name, (a, b, slices), x_rows, by_row in (
            ("gate_up", self.stacks[0], (q, scale), top_k),
            ("down", self.stacks[1], (h, h_scale), 1),
        ):
            splits = lora_splits(x_rows[0].shape[1], pairs)
            planes = torch.randn(splits, pairs, a[0].shape[1], dtype=FP32, device=self.device)
            shrinks = [(x_rows[0], a[0], *plan, splits, a[1], x_rows[1], by_row) for plan in lora_plans]
            expands = [(planes, b[0], *plan, slices, b[1]) for plan in lora_plans]
            yield Case(
                f"{name} shrink", lora_shrink, shrinks, stacks * a[0][0].nbytes + x_rows[0].nbytes + planes.nbytes
            )
            delta = 2.0 * pairs * sum(slices)
            yield Case(f"{name} expand", lora_expand, expands, stacks * b[0][0].nbytes + planes.nbytes + delta)

    def experts_of(self, tokens: int) -> torch.Tensor:
        """Return random experts [T, k], different ones of a token."""
        return random_experts(tokens, self.shape.experts, self.shape.top_k, self.device)

    def plan(self, groups: torch.Tensor, count: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (order, tiles) of pairs."""
        plan: tuple[torch.Tensor, torch.Tensor] = group_plan.overload(groups, count, tile)
        return plan


def launches_of(case: Case) -> tuple[list[Callable[[], Any]], list[tuple[torch.Tensor, ...]]]:
    """Return the launches of a case and their outputs, which all launches share."""
    out = as_outputs(case.op.fake(*case.args[0]))
    return [partial(case.op.launch, *args, out=out) for args in case.args], [out] * len(case.args)


def check(launch: Callable[[], Any], out: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> str:
    """Return "ok", or how far the results of a launch are from the reference's."""
    error = launch_error(launch, out, expected)
    if error is None:
        return "OTHER BITS AT A SECOND LAUNCH"
    return "ok" if error <= MAX_ERROR else f"WRONG BY {error:.1e}"


def bench(case: Case, tokens: int, gpu: Gpu, repeats: int) -> dict[str, Any]:
    """Check and time a case, and print and return its row."""
    launches, outs = launches_of(case)
    verdict = check(launches[0], outs[0], as_outputs(case.op.reference(*case.args[0])))
    us = time_us(launches, case.read, repeats)
    print_row(tokens, case, gpu, us, verdict)
    return {"tokens": tokens, "case": case.name, "us": round(us, 2), "bytes": case.read, "verdict": verdict}


def print_row(tokens: int, case: Case, gpu: Gpu, us: float | None = None, verdict: str = "") -> None:
    """Print a row of the table: time, floor, share of the bandwidth, rate of operations."""
    floor = case.read / gpu.bytes_per_second() * 1e6
    share = "" if us is None else f"{us:>9.2f}{floor / us:>7.0%}"
    rate = "" if us is None or not case.operations else f"{case.operations / us / 1e6:>8.1f} TOP/s"
    print(f"{tokens:>5}  {case.name:<16}{case.read / 1e6:>9.2f} MB{floor:>9.2f}{share}{rate}  {verdict}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b", help="shape (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256, 8192], help="tokens of a step")
    parser.add_argument("--precision", choices=("int8", "fp8"), default="int8", help="weights (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases, such as gate_up")
    parser.add_argument("--repeats", type=int, default=9, help="timed replays, for the median (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print cases and floors only")
    parser.add_argument("-o", "--output", type=Path, help="JSON file of the figures")
    options = parser.parse_args(arguments)
    dtype = torch.int8 if options.precision == "int8" else torch.float8_e4m3fn
    if not (options.dry_run or torch.cuda.is_available()):
        raise SystemExit("moe_kernels times CUDA kernels, and this machine has no GPU; use --dry-run")
    gpu = H200 if options.dry_run else gpu_of()
    print(f"{options.model}, {options.precision}; floor and share: at {gpu.describe_bandwidth()}")
    print(f"{'T':>5}  {'kernel':<16}{'bytes':>12}{'floor us':>9}{'us':>9}{'share':>7}")
    rows: list[dict[str, Any]] = []
    layer = Layer(SHAPES[options.model], dtype, "meta" if options.dry_run else "cuda")
    for tokens in options.tokens:
        for case in layer.cases(tokens):
            if options.only and case.name not in options.only:
                continue
            if options.dry_run:
                print_row(tokens, case, gpu)
                continue
            try:
                rows.append(bench(case, tokens, gpu, options.repeats))
            except Exception as problem:  # the other kernels are still worth their time
                print(f"{tokens:>5}  {case.name:<16}{type(problem).__name__}: {problem}", flush=True)
                continue
            if options.output is not None:
                options.output.write_text(json.dumps({"gpu": gpu.to_json(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
