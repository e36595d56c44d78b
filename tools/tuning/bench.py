"""Check and time the configurations of one linear for `sidestream tune`.

A launch is timed as in a step: after a small kernel that makes its input (the quantization of the tokens), with
programmatic dependent launch, and with weights outside the L2 cache, since several copies take turns. The time of the
small kernel alone is subtracted. All configurations read the same copies, and their replays are interleaved, so that
neither addresses nor clock changes favour one.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ...ops.elementwise.quantize import SILU_ROTATES, quantize_rowwise
from ...ops.elementwise.silu_mul import silu_mul_quant
from ...ops.linear.kernel_selection import LinearConfig, work_split
from ...ops.linear.kernel_wide import launch_wide
from ...ops.linear.linear_8bit import launch_config
from ..bench.layer import captured, elapsed_us
from .table import Timing, show

COLD_BYTES = 240e6  # weights that take turns; several times the L2 cache
E4M3 = torch.float8_e4m3fn
# relative to the exact product: bf16 rounding is 1.7e-3, e4m3's sums of 14 bits over K = 28672 below 6e-3
MAX_ERROR = {E4M3: 8e-3, torch.int8: 3e-3}
INT8_DEVIATION = 30.0  # of int8 weights: rows of normal values have their largest at about 4.2 deviations

Run = Callable[[torch.Tensor, torch.Tensor], Any]  # launches for one weight and its scales
RunConfig = Callable[[LinearConfig, torch.Tensor, torch.Tensor], Any]


class Bench:
    """Random weights [n, k] and tokens of one entry, and the exact product."""

    def __init__(self, n: int, k: int, tokens: int, repeats: int, dtype: torch.dtype = E4M3) -> None:
        self.n, self.k, self.tokens, self.repeats, self.dtype = n, k, tokens, repeats, dtype
        self.rotate = SILU_ROTATES if dtype == torch.int8 else 0
        copies = max(2, min(12, int(COLD_BYTES // (n * k)) + 1))
        self.rounds = max(1, 8 // copies)
        self.weights = [
            (_random_weight(n, k, dtype), (torch.rand(n, device="cuda") + 0.5) / k**0.5) for _ in range(copies)
        ]
        self.x = torch.randn(tokens, k, device="cuda").to(torch.bfloat16)
        self.q, self.scale = torch.empty(tokens, k, dtype=dtype, device="cuda"), torch.empty(tokens, device="cuda")
        self._quantize()
        weight, weight_scale = self.weights[0]
        product = torch.cat([self.q.float() @ part.float().t() for part in weight.split(8192)], dim=1)
        self.exact = product * self.scale[:, None] * weight_scale

    def linear(
        self, configs: Iterable[LinearConfig], sms: int, advance: Callable[[], Any], report: Callable[[str], Any]
    ) -> list[Timing]:
        """Time each configuration of `linear_8bit` with right results."""
        out = torch.empty(self.tokens, self.n, dtype=torch.bfloat16, device="cuda")

        def run(config: LinearConfig, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
            launch_config(config, self.q, self.scale, weight, weight_scale, None, None, out, sms=sms, pdl=True)

        right = self._right(configs, run, out, self.exact, lambda: None, advance, report)
        return self._timings(right, self._times([graph for _, _, graph in right]))

    def activation(
        self,
        configs: Iterable[LinearConfig],
        separate: LinearConfig,
        sms: int,
        advance: Callable[[], Any],
        report: Callable[[str], Any],
    ) -> tuple[list[Timing], float]:
        """Time `linear_8bit_silu_mul` with the quantization of its result, and two separate launches.

        Those are the linear in the `separate` configuration and `silu_mul_quant`. Rows of int8 are rotated, as in
        compiled programs.
        """
        h = torch.empty(self.tokens, self.n // 2, dtype=torch.bfloat16, device="cuda")
        quantized, scale = torch.empty_like(h, dtype=self.dtype), torch.empty(self.tokens, device="cuda")
        gate, up = self.exact.chunk(2, dim=1)

        def run(config: LinearConfig, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
            split = work_split(config, self.tokens, self.n, self.k, sms)
            launch_wide(self.q, self.scale, weight, weight_scale, None, None, h, config, split, True, activate=True)

        def after() -> None:
            quantize_rowwise.launch(h, self.dtype, self.rotate, out=(quantized, scale), pdl=True)

        right = self._right(configs, run, h, torch.nn.functional.silu(gate) * up, after, advance, report)
        two = self.separate(separate, sms)  # kept, since a graph writes into its tensors
        times = self._times([self._capture(two), *(graph for _, _, graph in right)])
        return self._timings(right, times[1:]), times[0]

    def separate(self, config: LinearConfig, sms: int) -> Run:
        """Return the linear and `silu_mul_quant` as two launches."""
        packed = torch.empty(self.tokens, self.n, dtype=torch.bfloat16, device="cuda")
        out = silu_mul_quant.fake(packed, None, False, self.dtype, self.rotate)

        def both(weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
            launch_config(config, self.q, self.scale, weight, weight_scale, None, None, packed, sms=sms, pdl=True)
            silu_mul_quant.launch(packed, None, False, self.dtype, self.rotate, out=out, pdl=True)

        return both

    def _right(
        self,
        configs: Iterable[LinearConfig],
        run: RunConfig,
        out: torch.Tensor,
        exact: torch.Tensor,
        after: Callable[[], None],
        advance: Callable[[], Any],
        report: Callable[[str], Any],
    ) -> list[tuple[LinearConfig, float, torch.cuda.CUDAGraph]]:
        """Yield (configuration, error, graph of it and `after`) of those with right results."""
        configs = list(configs)
        compile_together([partial(run, config, *self.weights[0]) for config in configs])

        def launches(config: LinearConfig) -> Run:
            def both(weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
                run(config, weight, weight_scale)
                after()

            return both

        found = []
        for config in configs:
            try:
                error = self._check(config, run, out, exact)
                if error is None or not error < MAX_ERROR[self.dtype]:
                    report(
                        f"left out, {'other bits at a second launch' if error is None else f'wrong by {error:.1e}'}: "
                        f"{show(config)}"
                    )
                    continue
                found.append((config, error, self._capture(launches(config))))
            # a tile that this GPU or Triton does not support: compiler and driver raise various types
            except Exception as problem:
                report(f"left out, {type(problem).__name__}: {show(config)}")
            finally:
                advance()
        return found

    def _timings(self, right: Sequence[tuple[LinearConfig, float, Any]], times: Sequence[float]) -> list[Timing]:
        return [Timing(config, us, error) for (config, error, _), us in zip(right, times, strict=True)]

    def _check(self, config: LinearConfig, run: RunConfig, out: torch.Tensor, exact: torch.Tensor) -> float | None:
        """Return the error relative to `exact`, starting from a NaN output; None if a second launch differs."""
        results = []
        for _ in range(2):
            out.fill_(float("nan"))
            run(config, *self.weights[0])
            results.append(out.clone())
        if not torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)):
            return None
        return float((results[0].float() - exact).norm() / exact.norm())

    def _quantize(self) -> None:
        quantize_rowwise.launch(self.x, self.dtype, out=(self.q, self.scale), pdl=True)

    def _capture(self, run: Run) -> torch.cuda.CUDAGraph:
        """Run the quantization and `run` after it, over all copies of the weights."""
        run(*self.weights[0])
        return captured(
            [launch for weight in self.weights for launch in (self._quantize, partial(run, *weight))], self.rounds
        )

    def _times(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """Return microseconds of each graph for one weight, without the quantization."""
        alone = self._capture(lambda weight, weight_scale: None)
        first, *others = take_turns([partial(elapsed_us, graph.replay) for graph in (alone, *graphs)], self.repeats)
        return [(us - first) / (self.rounds * len(self.weights)) for us in others]


def compile_together(launches: Sequence[Callable[[], Any]]) -> None:
    """Compile several kernels at a time by launching each once; failures are reported later."""

    def attempt(launch: Callable[[], Any]) -> None:
        torch.cuda.set_device(0)
        with suppress(Exception):
            launch()

    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        list(pool.map(attempt, launches))
    torch.cuda.synchronize()


def take_turns(replays: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median time of each replay. The replays are interleaved, and the first round is a warm-up."""
    turns = [[replay() for replay in replays] for _ in range(repeats + 1)]
    return [statistics.median(times) for times in zip(*turns[1:], strict=True)]


def _random_weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.empty(rows, columns, dtype=dtype, device="cuda")
    for part in weight.split(16384):
        values = torch.randn(part.shape, device="cuda")
        part.copy_((values * INT8_DEVIATION).round_().clamp_(-127, 127) if dtype == torch.int8 else values)
    return weight
