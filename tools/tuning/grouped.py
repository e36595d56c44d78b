"""Check and time the configurations of one linear of experts for `sidestream tune`.

Experts of the tokens are random. Launches of several routings take turns in a CUDA graph, so that weights come from
memory and not from the L2 cache; launches do not overlap. A configuration counts only if its results are right and are
the same bits twice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...compiler.cost.bytes_and_flops import DEFAULT
from ...compiler.options import torch_dtype
from ...ops.core.registry import as_outputs
from ...ops.linear.kernel_selection import LinearConfig
from ...ops.moe.grouped_linear import expert_tile, grouped_linear_8bit
from ...ops.moe.grouped_linear_8bit_silu_mul import grouped_linear_8bit_silu_mul
from ...ops.moe.kernel_triton import candidates, launch_grouped
from ...ops.moe.plan import group_plan
from ..bench.layer import launch_us
from .bench import compile_together
from .table import Job, Timing, show

MAX_ERROR = 1e-2  # relative, of floats; fraction of different integers
COLD_BYTES = 240e6  # bytes that the launches of a graph read before they read the same again
ROUTINGS = 24


def grouped_configs(job: Job) -> list[LinearConfig]:
    """Return the configurations to measure for an entry of experts."""
    return candidates(expert_tile(job.pairs, job.experts), torch_dtype(job.dtype))


class GroupedBench:
    """Random weights [E, N, K], rows and routings of one entry."""

    def __init__(self, job: Job, repeats: int, device: str = "cuda") -> None:
        self.repeats = repeats
        by_row = job.top_k if job.layer == "experts_gate_up" else 1
        tile, dtype = expert_tile(job.pairs, job.experts), torch_dtype(job.dtype)
        q, scale = random_rows((job.pairs // by_row, job.k), dtype, device)
        weights = random_rows((job.experts, job.n, job.k), dtype, device)
        operands = q, scale * job.k**0.5, *weights
        scores = (torch.rand(job.tokens, job.experts, device=device) for _ in range(ROUTINGS))
        chosen = (each.topk(job.top_k).indices.to(torch.int32) for each in scores)
        plans = [group_plan.overload(each.view(-1), job.experts, tile) for each in chosen]
        self.args = [(*operands, *plan, tile, by_row, torch.bfloat16) for plan in plans]
        used = DEFAULT.experts_of(job.experts, job.top_k, job.tokens)
        self.read = used * job.n * (job.k + 4) + q.nbytes + 2.0 * job.pairs * job.n

    def timings(
        self,
        configs: Sequence[LinearConfig],
        activate: bool,
        advance: Callable[[], Any],
        report: Callable[[str], Any],
    ) -> list[Timing]:
        """Time each configuration with right results; `activate`: of the linear with SiLU * mul in its launch."""
        out, expected = self.outputs(activate)

        def launch(config: LinearConfig, args: tuple[Any, ...]) -> None:
            x, scale, weight, weight_scale, order, tiles, _, by_row, _ = args
            given = x, scale, weight, weight_scale, None, order, tiles, by_row, out[0], config
            launch_grouped(*given, activate=activate)

        compile_together([partial(launch, config, self.args[0]) for config in configs])
        found = []
        for config in configs:
            try:
                error = launch_error(partial(launch, config, self.args[0]), out, expected)
                if error is None or not error <= MAX_ERROR:
                    problem = "other bits at a second launch" if error is None else f"wrong by {error:.1e}"
                    report(f"left out, {problem}: {show(config)}")
                    continue
                us = time_us([partial(launch, config, args) for args in self.args], self.read, self.repeats)
                found.append(Timing(config, us, error))
            # a tile that this GPU or Triton does not support: compiler and driver raise various types
            except Exception as problem:
                report(f"left out, {type(problem).__name__}: {show(config)}")
            finally:
                advance()
        return found

    def outputs(self, activate: bool) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return empty results of the first routing, and the reference's."""
        *operands, order, tiles, tile, by_row, dtype = self.args[0]
        op, between = (grouped_linear_8bit_silu_mul, ()) if activate else (grouped_linear_8bit, (None,))
        args = (*operands, *between, order, tiles, tile, by_row, dtype)
        return as_outputs(op.fake(*args)), as_outputs(op.reference(*args))


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., K] in eight bits whose values have a variance of about 1 / K, and their scales."""
    values = torch.empty(*shape, dtype=dtype, device=device)
    step = 36.0 if dtype == torch.int8 else 1.0
    for part in values.view(-1, shape[-1]).split(1 << 16):
        part.copy_((torch.randn(part.shape, device=device) * step).round().clamp(-127, 127))
    return values, torch.full(shape[:-1], shape[-1] ** -0.5 / step, dtype=torch.float32, device=device)


def launch_error(
    launch: Callable[[], Any], out: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
) -> float | None:
    """Return how far the results of a launch are from the reference's; None if a second launch gives other bits."""
    results = []
    for _ in range(2):
        for each in out:
            each.view(torch.uint8).fill_(0x7F)
        launch()
        torch.cuda.synchronize()
        results.append([each.clone() for each in out])
    if any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True)):
        return None
    pairs = zip(results[0], expected, strict=True)
    return max((error_of(got, want) for got, want in pairs if want.numel()), default=0.0)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative error of floats, or the fraction of integers that differ by more than one step."""
    want = want.to(got.device)
    if not got.dtype.is_floating_point:
        return float(((got.int() - want.int()).abs() > (1 if got.dtype == torch.int8 else 0)).float().mean())
    error = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-9))
    return error if error == error else float("inf")


def time_us(launches: list[Callable[[], Any]], read: float, repeats: int) -> float:
    """Return microseconds per launch; fewer than two launches would always read the same from L2."""
    rounds = max(1, min(8, int(COLD_BYTES / max(1.0, read * len(launches)))))
    return launch_us(launches, rounds, repeats)
