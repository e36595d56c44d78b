"""`sidestream tune --in-layers`: time a linear's best configurations in whole decode layers.

In a layer a linear shares the GPU with LoRA's launches. A configuration that is slightly slower alone may leave more
SMs, registers or shared memory to them, and make layers faster.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...compiler.options import CompileOptions
from ...compiler.program.program import Program
from ...ops.linear import kernel_selection as tuning
from ...ops.linear.kernel_selection import LinearConfig, instead, table_op, work_split
from ..bench.layer import DEPTHS, Layers, Variant, layer_us
from ..options.models import zipf
from .table import Job, Timing, show

MOST = 6  # tried shapes of a launch, besides the table's
SLOWER = 1.5  # slower ones, relative to the fastest alone, are not tried
FEWER_REGISTERS = (72, 96)  # per thread: leaves room for LoRA's programs at 4 warps
OTHER_REGISTERS = 40  # per thread, besides its part of the sums
ROUNDS, REPEATS = 2, 7
RANK, SLOTS = 32, 8


@dataclass(frozen=True)
class InLayers:
    """Microseconds of a decode layer with one configuration."""

    config: LinearConfig
    adapters: float
    base: float

    @property
    def us(self) -> float:
        """Minimize a layer with adapters, or one without."""
        return self.adapters + self.base


class LayerBench:
    """Decode layers of a model (fields of config.json) in one dtype, with adapters of rank 32 and without."""

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._layers = Layers(RANK, SLOTS, options=CompileOptions(precision=dtype), config=config)  # type: ignore[arg-type]
        self._programs: dict[tuple[int, bool], dict[int, Program]] = {}

    def us(self, job: Job, config: LinearConfig, lora: bool) -> float:
        """Return microseconds of a layer of `job.tokens` sequences with this configuration of its linear."""
        chosen = zipf(range(SLOTS), job.tokens)
        key = job.tokens, lora
        if key not in self._programs:
            self._programs[key] = {
                depth: self._layers.program(depth, job.tokens, Variant("auto" if lora else "none")) for depth in DEPTHS
            }
        with instead(table_op("linear_8bit", job.int8), (job.n, job.k, job.tokens), config):
            return layer_us(
                self._programs[key],
                {depth: self._layers.tensors(depth, job.tokens, chosen) for depth in DEPTHS},
                REPEATS,
            )


def finalists(measured: Sequence[Timing], job: Job, sms: int) -> list[LinearConfig]:
    """Return the table's configuration, then the fastest of each launch shape, and the same with fewer registers."""
    found = [tuning.linear_config(job.tokens, job.n, job.k, sms, int8=job.int8)]
    shapes: set[tuple[object, ...]] = set()
    limit = SLOWER * min(timing.us for timing in measured)
    for timing in sorted(measured, key=lambda timing: timing.us):
        config = timing.config
        split = work_split(config, job.tokens, job.n, job.k, sms)
        shape = config.kernel, config.block_n, config.block_t, split.programs, config.warps
        if shape in shapes or timing.us > limit or len(shapes) == MOST:
            continue
        shapes.add(shape)
        found.append(config)
        if config.kernel == "gluon" and config.warps == 4 and config.ctas_per_sm == 1:
            found += [
                replace(config, max_registers=most)
                for most in FEWER_REGISTERS
                if config.block_n * config.block_t <= 128 * (most - OTHER_REGISTERS)
            ]
    return list(dict.fromkeys(found))


def best_in_layers(
    bench: LayerBench, job: Job, configs: Sequence[LinearConfig], report: Callable[[str], Any]
) -> LinearConfig:
    """Return the configuration with the fastest layers; they take turns, and every figure is printed."""
    times: dict[LinearConfig, list[tuple[float, float]]] = {config: [] for config in configs}
    for _ in range(ROUNDS):
        for config in configs:
            times[config].append((bench.us(job, config, True), bench.us(job, config, False)))
    results = [
        InLayers(config, statistics.mean(one for one, _ in found), statistics.mean(two for _, two in found))
        for config, found in times.items()
    ]
    for result in sorted(results, key=lambda result: result.us):
        figures = f"{result.adapters:6.1f} us a layer with adapters, {result.base:6.1f} without"
        now = "  (as it was)" if result.config is configs[0] else ""
        report(f"{job.layer:>8} [{job.n}, {job.k}] x {job.tokens:<4} {figures}  {show(result.config)}{now}")
    return min(results, key=lambda result: result.us).config
