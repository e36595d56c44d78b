"""Checks and times one linear's configurations for `sidestream tune`.

A launch is timed as a step has it: behind a small kernel that makes its input (the quantization of the tokens), with programmatic dependent launch, and with
weights that are not in the L2 cache, because several copies take turns. What the small kernel takes alone is subtracted.
"""
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from ..ops.linear_fp8 import launch_config
from ..ops.linear_fp8_wide import launch_wide
from ..ops.quantize import quantize_rowwise
from ..ops.silu_mul import silu_mul_quant
from ..ops.tuning import LinearConfig, work_split
from .tune import Timing, show

COLD_BYTES = 240e6  # weights that take turns; several times the L2 cache
MOST_ERROR = 8e-3  # relative to the exact product: bf16 rounding is 1.7e-3, sums of 14 bits over K = 28672 stay below 6e-3
E4M3 = torch.float8_e4m3fn


class Bench:
    """Random weights [n, k] and tokens of one entry, and the exact product."""

    def __init__(self, n: int, k: int, tokens: int, repeats: int) -> None:
        self.n, self.k, self.tokens, self.repeats = n, k, tokens, repeats
        copies = max(2, min(12, int(COLD_BYTES // (n * k)) + 1))
        self.weights = [(_random_e4m3(n, k), (torch.rand(n, device="cuda") + 0.5) / k**0.5) for _ in range(copies)]
        self.x = torch.randn(tokens, k, device="cuda").to(torch.bfloat16)
        self.q, self.scale = torch.empty(tokens, k, dtype=E4M3, device="cuda"), torch.empty(tokens, device="cuda")
        self._quantize()
        weight, weight_scale = self.weights[0]
        product = torch.cat([self.q.float() @ part.float().t() for part in weight.split(8192)], dim=1)
        self.exact = product * self.scale[:, None] * weight_scale

    def linear(self, configs: Iterable[LinearConfig], sms: int, advance: Callable[[], Any], say: Callable[[str], Any]) -> Iterator[Timing]:
        """Each configuration of `linear_fp8` that gives right results, timed."""
        out = torch.empty(self.tokens, self.n, dtype=torch.bfloat16, device="cuda")
        alone = self._time(lambda weight, weight_scale: None)

        def run(config: LinearConfig, weight: torch.Tensor, weight_scale: torch.Tensor, pdl: bool) -> None:
            launch_config(config, self.q, self.scale, weight, weight_scale, None, None, out, sms=sms, pdl=pdl)

        yield from self._each(configs, run, out, self.exact, lambda: None, alone, advance, say)

    def activation(self, configs: Iterable[LinearConfig], sms: int, advance: Callable[[], Any], say: Callable[[str], Any]) -> Iterator[Timing]:
        """The same for `linear_fp8_silu_mul`, the quantization of its result included."""
        h = torch.empty(self.tokens, self.n // 2, dtype=torch.bfloat16, device="cuda")
        quantized, scale = torch.empty_like(h, dtype=E4M3), torch.empty(self.tokens, device="cuda")
        gate, up = self.exact.chunk(2, dim=1)
        alone = self._time(lambda weight, weight_scale: None)

        def run(config: LinearConfig, weight: torch.Tensor, weight_scale: torch.Tensor, pdl: bool) -> None:
            split = work_split(config, self.tokens, self.n, self.k, sms)
            launch_wide(self.q, self.scale, weight, weight_scale, None, None, h, config, split, pdl, activate=True)

        def after() -> None:
            quantize_rowwise.launch(h, out=(quantized, scale), pdl=True)

        yield from self._each(configs, run, h, torch.nn.functional.silu(gate) * up, after, alone, advance, say)

    def separate(self, config: LinearConfig, sms: int) -> float:
        """Microseconds of the linear and `silu_mul_quant` as two launches."""
        packed = torch.empty(self.tokens, self.n, dtype=torch.bfloat16, device="cuda")
        out = silu_mul_quant.fake(packed, None, False)
        alone = self._time(lambda weight, weight_scale: None)

        def both(weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
            launch_config(config, self.q, self.scale, weight, weight_scale, None, None, packed, sms=sms, pdl=True)
            silu_mul_quant.launch(packed, None, False, out=out, pdl=True)

        return self._time(both) - alone

    def _each(self, configs: Iterable[LinearConfig], run: Callable[..., None], out: torch.Tensor, exact: torch.Tensor, after: Callable[[], None],
              alone: float, advance: Callable[[], Any], say: Callable[[str], Any]) -> Iterator[Timing]:
        configs = list(configs)
        self._compile(configs, run)

        def launches(config: LinearConfig) -> Callable[[torch.Tensor, torch.Tensor], None]:
            def both(weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
                run(config, weight, weight_scale, pdl=True)
                after()

            return both

        for config in configs:
            try:
                error = self._check(config, run, out, exact)
                if error is None or not error < MOST_ERROR:
                    say(f"left out, {'other bits at a second launch' if error is None else f'wrong by {error:.1e}'}: {show(config)}")
                    continue
                yield Timing(config, self._time(launches(config)) - alone, error)
            except Exception as problem:  # a tile that this GPU or this Triton does not take: its compiler and its driver raise types of their own
                say(f"left out, {type(problem).__name__}: {show(config)}")
            finally:
                advance()

    def _compile(self, configs: list[LinearConfig], run: Callable[..., None]) -> None:
        """Compiles several kernels at a time; what fails here is said when its turn comes."""

        def attempt(config: LinearConfig) -> None:
            torch.cuda.set_device(0)
            with suppress(Exception):
                run(config, *self.weights[0], pdl=True)

        with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            list(pool.map(attempt, configs))
        torch.cuda.synchronize()

    def _check(self, config: LinearConfig, run: Callable[..., None], out: torch.Tensor, exact: torch.Tensor) -> float | None:
        """The error relative to `exact`, of a result that was NaN before; None if a second launch gives other bits."""
        results = []
        for _ in range(2):
            out.fill_(float("nan"))
            run(config, *self.weights[0], pdl=True)
            results.append(out.clone())
        if not torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)):
            return None
        return float((results[0].float() - exact).norm() / exact.norm())

    def _quantize(self) -> None:
        quantize_rowwise.launch(self.x, out=(self.q, self.scale), pdl=True)

    def _time(self, run: Callable[[torch.Tensor, torch.Tensor], Any]) -> float:
        """Microseconds of the quantization and `run` behind it, over all copies of the weights, in a CUDA graph."""
        rounds = max(1, 8 // len(self.weights))
        run(*self.weights[0])
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for weight in self.weights:
                    self._quantize()
                    run(*weight)
        times = []
        for _ in range(self.repeats + 1):  # the first one warms up
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / (rounds * len(self.weights)))
        return statistics.median(times[1:])


def _random_e4m3(rows: int, columns: int) -> torch.Tensor:
    weight = torch.empty(rows, columns, dtype=E4M3, device="cuda")
    for part in weight.split(16384):
        part.copy_(torch.randn(part.shape, device="cuda"))
    return weight
