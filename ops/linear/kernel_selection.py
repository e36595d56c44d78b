"""Kernel and tiles of a linear: measured choices from `tuned/*.json`, a heuristic for other shapes."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from ..core.triton_support import cdiv, next_power_of_2

Kernel = Literal["triton", "gluon", "wide", "large", "scaled_mm"]
TABLES = Path(__file__).parent / "tuned"
TUNED = TABLES / "h200.json"
SCALED_MM_TOKENS = 256  # with more tokens a linear is bound by arithmetic, not by bytes
WIDE = 16384  # outputs from which on there are several tiles per SM
RING_BYTES = 190 * 1024  # maximum shared memory of the rings of an SM
MAX_UNEVENNESS = 1.15  # maximum ratio of longest to mean work with whole tiles; above it programs share tiles
BLOCK_K = 128  # columns of K per step: 128 bytes, the widest TMA swizzle
MAX_PARTS = 8  # maximum programs per tile: adding more planes takes too long
MAX_TILES = 1 << 16  # tiles of a launch with shared tiles: one arrival counter each
MAX_UNITS = 2**31 - 1  # units x programs must fit 32 bits
WIDE_BYTES = 225 * 1024  # the wide kernel's ring and staging buffer
WIDE_STAGING = 32 * 1024  # the wide kernel's staging buffer
# (kernel, token rows of a tile) -> relative time of an int8 product with hundreds of tokens. Slower ones load
# more bytes per product.
INT8_COST = {("large", 192): 1.0, ("large", 128): 1.03, ("large", 256): 1.04, ("wide", 256): 1.12, ("wide", 128): 1.4}
INT8_SHARING = 2**25  # time to exchange the sums of a shared tile, as a number of products
LARGE_PIECE = 64  # columns per store of the large kernel


@dataclass(frozen=True)
class LinearConfig:
    """Launch parameters of a linear_8bit.

    A tile is `block_n` weight rows x `block_t` tokens, read `block_k` columns at a time through a ring of `stages`
    buffers by `warps` warps. Each SM runs `ctas_per_sm` programs, at most `ctas` in total (0 = no limit). `split`:
    always divide the work evenly, also within tiles; otherwise only if whole tiles would be too uneven. Wide kernel:
    after `promote` steps the tensor cores' running sum, which has 14 bits, is added to a sum in fp32 (0: at the end of
    the tile); `parts` programs, 1, 2 or 4, share the steps of each tile.
    """

    kernel: Kernel
    block_n: int = 64
    block_t: int = 16
    block_k: int = BLOCK_K
    stages: int = 4
    warps: int = 4
    ctas_per_sm: int = 1
    ctas: int = 0
    split: bool = False
    max_registers: int = 0
    promote: int = 0
    parts: int = 1


@dataclass(frozen=True)
class WorkSplit:
    """Division of a launch's work: `programs` in the grid, at most `parts` (a power of two) per tile.

    split  whether programs share tiles
    """

    programs: int
    parts: int
    split: bool


@lru_cache(maxsize=4096)
def work_split(config: LinearConfig, tokens: int, n: int, k: int, sms: int) -> WorkSplit:
    """Return the division of a launch's work on `sms` SMs (all SMs of the GPU, or a budget)."""
    steps = cdiv(k, config.block_k)
    tiles = cdiv(n, config.block_n) * cdiv(tokens, config.block_t)
    units = tiles * steps
    if config.kernel == "large":
        # the fewest programs that need no more rounds: the other SMs are for LoRA
        return WorkSplit(cdiv(tiles, cdiv(tiles, sms)), 1, False)
    if config.kernel == "wide":  # sharing programs wait for each other, so each needs an SM
        shared = config.parts > 1 and tiles * config.parts <= min(sms, MAX_TILES) and steps >= config.parts
        return WorkSplit(tiles * config.parts, config.parts, True) if shared else WorkSplit(min(sms, tiles), 1, False)
    whole = min(sms * config.ctas_per_sm, config.ctas or MAX_UNITS, tiles)
    # share tiles if the programs with one tile more than others would run too long
    uneven = cdiv(tiles, whole) * whole > MAX_UNEVENNESS * tiles
    if tiles > MAX_TILES or not (config.split or uneven):
        return WorkSplit(whole, 1, False)
    programs = min(
        sms * config.ctas_per_sm, config.ctas or MAX_UNITS, units, tiles * MAX_PARTS, max(1, MAX_UNITS // units - 1)
    )
    parts = max(
        ((t + 1) * steps * programs - 1) // units - ((t * steps + 1) * programs - 1) // units + 1 for t in range(tiles)
    )
    return WorkSplit(programs, next_power_of_2(parts), parts > 1)


def gpu_slug(device: str) -> str:
    """Return the name of a GPU's table: `NVIDIA H200` -> `h200`."""
    return "-".join(re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))) or "gpu"


def table_path(device: str | None) -> Path:
    """Return the path of this GPU's table, or of the H200's if it has none."""
    own = TUNED if device is None else TABLES / f"{gpu_slug(device)}.json"
    return own if own.exists() else TUNED


def this_gpu() -> str | None:
    """Return the name of the GPU in use; None before CUDA is initialised."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None


def tuned_table(op: str = "linear_fp8") -> dict[tuple[int, int, int], LinearConfig]:
    """Return (N, K, padded tokens) -> the fastest configuration of `op` on this GPU, else on an H200."""
    return {**read_table(TUNED, op), **read_table(_path_for(this_gpu()), op), **_instead.get(op, {})}


_instead: dict[str, dict[tuple[int, int, int], LinearConfig]] = {}


@contextmanager
def instead(op: str, place: tuple[int, int, int], config: LinearConfig) -> Iterator[None]:
    """Override one entry of the table of `op` within the context, to measure it in whole programs."""
    _instead[op] = {place: config}
    try:
        yield
    finally:
        del _instead[op]


_path_for = lru_cache(maxsize=8)(table_path)


@lru_cache(maxsize=16)
def read_table(path: Path, op: str) -> dict[tuple[int, int, int], LinearConfig]:
    """Return one op's entries of a table file."""
    table = {}
    for shape in json.loads(path.read_text()).get(op, ()):
        for tokens, config in shape["tokens"].items():
            table[shape["n"], shape["k"], int(tokens)] = LinearConfig(**config)
    return table


def table_op(op: str, int8: bool) -> str:
    """Return the name of an op's entries in a table, by operand dtype: `linear_int8`, `linear_fp8_silu_mul`."""
    return op.replace("8bit", "int8" if int8 else "fp8")


def activation_config(tokens: int, n: int, k: int, int8: bool = False) -> LinearConfig | None:
    """Return the one-launch configuration of `linear_8bit_silu_mul` for a weight [N, K] of gates and ups.

    None: two launches are as fast, or there is no measurement.
    """
    config = tuned_table(table_op("linear_8bit_silu_mul", int8)).get((n, k, padded_tokens(tokens)))
    return config if config is not None and n % config.block_n == 0 else None


def padded_tokens(tokens: int) -> int:
    """Return the power of two (>= 16) under which a token count is tuned."""
    return max(16, next_power_of_2(tokens))


def ring_stages(block_n: int, block_t: int, ctas_per_sm: int) -> int:
    """Return the number of buffers of a tile's weights and activations that fit an SM's shared memory."""
    return max(2, min(16, RING_BYTES // ctas_per_sm // ((block_n + block_t) * BLOCK_K)))


def consumer_warps(block_n: int, block_t: int) -> int:
    """Return 4, or 8 if the running sums of a tile would take more than 64 registers per thread."""
    return 8 if block_n * block_t > 64 * 128 else 4


def most_registers(warps: int, ctas_per_sm: int) -> int:
    """Return the maximum registers per thread with which `ctas_per_sm` programs and a small other program fit an SM.

    The producer's warpgroup is included.
    """
    if ctas_per_sm > 1:
        return 128 if warps == 4 else 80
    return 168 if warps == 4 else 152


def choose_config(tokens: int, n: int, k: int, sm_count: int, scaled_mm: bool = True) -> LinearConfig:
    """Return a configuration for an unmeasured shape, by rules derived from the fastest ones of measured shapes.

    scaled_mm   the result of `scaled_mm_takes`: whether `torch._scaled_mm` and the wide kernel support the product
    """
    if scaled_mm and tokens > 64:
        shared = (
            [config for config in wide_candidates(tokens, n, sm_count) if config.parts > 1]
            if tokens <= SCALED_MM_TOKENS and n < WIDE
            else []
        )
        if shared:  # few tiles: several programs on each; most SMs, then fewest parts, then fp32 sums
            return max(
                shared,
                key=lambda config: (work_split(config, tokens, n, k, sm_count).programs, -config.parts, config.promote),
            )
        if tokens > 128 or n >= WIDE:
            return LinearConfig("scaled_mm")
    block_t = min(128, padded_tokens(tokens))
    if tokens > SCALED_MM_TOKENS:
        block_n, ctas_per_sm, ctas, split = 128, 1, 0, False
    elif n >= WIDE:  # several tiles per SM: whole tiles, and two programs per SM alternate
        block_n, ctas_per_sm, ctas, split = 128, 1 if block_t > 64 else 2, 0, False
    else:  # small tiles: about one per SM; if there are fewer, several programs share each
        block_n, ctas_per_sm = 64, 1
        tiles = cdiv(n, block_n) * cdiv(tokens, block_t)
        split = not 0.65 * sm_count <= tiles <= sm_count
        aligned = sm_count // tiles * tiles
        ctas = aligned if split and aligned > 0.9 * sm_count else 0
    stages, warps = ring_stages(block_n, block_t, ctas_per_sm), consumer_warps(block_n, block_t)
    return LinearConfig(
        "gluon", block_n, block_t, BLOCK_K, stages, warps, ctas_per_sm, ctas, split, most_registers(warps, ctas_per_sm)
    )


def without_tma(config: LinearConfig) -> LinearConfig:
    """Return the Triton kernel's configuration with the same tiles: for the interpreter, and for unaligned tensors."""
    block_n, block_t = (128, 128) if config.kernel in ("wide", "large") else (config.block_n, config.block_t)
    stages = max(2, min(4, config.stages))
    return replace(
        config, kernel="triton", block_n=block_n, block_t=block_t, stages=stages, max_registers=0, promote=0, parts=1
    )


def linear_config(
    tokens: int, n: int, k: int, sm_count: int, scaled_mm: bool = True, int8: bool = False
) -> LinearConfig:
    """Return the measured configuration (for int8, e4m3's if it has none), else the result of `choose_config`."""
    place = (n, k, padded_tokens(tokens))
    tuned = (tuned_table(table_op("linear_8bit", True)).get(place) if int8 else None) or tuned_table().get(place)
    if tuned is None or (tuned.kernel in ("scaled_mm", "wide", "large") and not scaled_mm):
        tuned = choose_config(tokens, n, k, sm_count, scaled_mm)
    return int8_config(tokens, n, k, sm_count) if int8 and tuned.kernel == "scaled_mm" else tuned


def int8_config(tokens: int, n: int, k: int, sm_count: int) -> LinearConfig:
    """Return the configuration with the least work on the busiest SM, for many tokens in int8."""
    found = [*large_candidates(), wide_config(128, 128), *_shared(256, 128, tokens, n, sm_count)]
    return min(found, key=lambda config: int8_cost(config, tokens, n, k, sm_count))


def int8_cost(config: LinearConfig, tokens: int, n: int, k: int, sm_count: int) -> float:
    """Return the work of the busiest SM, in products of the cheapest kernel."""
    programs = cdiv(tokens, config.block_t) * cdiv(n, config.block_n) * config.parts
    products = cdiv(programs, sm_count) * (config.block_t * config.block_n // config.parts) * k
    return INT8_COST[config.kernel, config.block_t] * products + (INT8_SHARING if config.parts > 1 else 0)


def _shared(block_t: int, block_n: int, tokens: int, n: int, sm_count: int) -> list[LinearConfig]:
    """Return wide kernel configurations with several programs per tile, for few tiles: at most one program per SM."""
    tiles = cdiv(n, block_n) * cdiv(tokens, block_t)
    return [wide_config(block_t, block_n, parts) for parts in (2, 4) if 0.6 * sm_count <= tiles * parts <= sm_count]


def large_candidates() -> list[LinearConfig]:
    """Return configurations of the large kernel."""
    return [
        LinearConfig("large", 256, 192, stages=3, warps=12, max_registers=128),
        LinearConfig("large", 256, 128, stages=4, warps=8, max_registers=168),
        LinearConfig("large", 128, 256, stages=4, warps=8, max_registers=168),
    ]


def with_addends(config: LinearConfig) -> LinearConfig:
    """Return the configuration for a launch with addends: three consumers have no registers for them."""
    return large_candidates()[1] if config.warps == 12 else config


def wide_config(block_t: int, block_n: int, parts: int = 1, promote: int = 0) -> LinearConfig:
    """Return a configuration of the wide kernel.

    The largest tiles use a whole SM; the others leave registers and shared memory for a LoRA kernel.
    """
    large = block_t * block_n > 128 * 128
    room = (WIDE_BYTES if large else RING_BYTES) - min(WIDE_STAGING, block_t * block_n * 2 // parts)
    registers = 168 if large else 128 if block_t * block_n > 128 * 64 else 96
    stages = min(6, room // ((block_t + block_n) * BLOCK_K))
    return LinearConfig(
        "wide", block_n, block_t, BLOCK_K, stages, 8, max_registers=registers, promote=promote, parts=parts
    )


def wide_candidates(tokens: int, n: int, sm_count: int, activate: bool = False) -> list[LinearConfig]:
    """Return configurations of the wide kernel to measure; `activate`: for `linear_8bit_silu_mul`."""
    found = []
    for block_t, block_n in ((128, 64), (128, 128), (128, 256), (256, 64), (256, 128)):
        if (block_t > 128 and tokens <= 128) or (activate and (n % block_n or block_n == 64)):
            continue
        tiles = cdiv(n, block_n) * cdiv(tokens, block_t)
        shared = () if activate else tuple(parts for parts in (2, 4) if 0.6 * sm_count <= tiles * parts <= sm_count)
        for parts in (1, *shared):
            found.append(wide_config(block_t, block_n, parts))
            if block_t * block_n <= 128 * 128:  # both fp32 sums and those of the tensor cores fit the registers
                found.append(wide_config(block_t, block_n, parts, promote=4))
    return found


def candidates(tokens: int, n: int, k: int, sm_count: int, int8: bool = False) -> list[LinearConfig]:
    """Return configurations to measure for this shape on a GPU of `sm_count` SMs."""
    block_t = min(128, padded_tokens(tokens))
    whole = n % 16 == 0
    found = [linear_config(tokens, n, k, sm_count, whole, int8), choose_config(tokens, n, k, sm_count, whole)]
    for block_n, ctas_per_sm in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1)):
        tiles = cdiv(n, block_n) * cdiv(tokens, block_t)
        slots = sm_count * ctas_per_sm
        # Even shares of the GPU; whole tiles; or a whole number of programs per tile: fewer exchanges, some idle SMs.
        grids = [
            (slots, True),
            (slots, False),
            *((tiles * cuts, True) for cuts in (1, 2, 3, 4, 6, 8) if 0.65 * slots <= tiles * cuts <= slots),
        ]
        warps = consumer_warps(block_n, block_t)
        if warps * ctas_per_sm > 8:
            continue  # the registers of two programs don't fit an SM
        deepest = ring_stages(block_n, block_t, ctas_per_sm)
        for ctas, cut in grids:
            for stages in dict.fromkeys((deepest, max(2, deepest * 2 // 3))):
                found.append(
                    LinearConfig(
                        "gluon",
                        block_n,
                        block_t,
                        BLOCK_K,
                        stages,
                        warps,
                        ctas_per_sm,
                        ctas,
                        cut,
                        most_registers(warps, ctas_per_sm),
                    )
                )
    for block_n, ctas_per_sm, cut in ((64, 2, True), (64, 3, True), (64, 4, True), (64, 4, False), (128, 2, True)):
        found.append(
            LinearConfig(
                "triton", block_n, block_t, BLOCK_K, 4, consumer_warps(block_n, block_t), ctas_per_sm, split=cut
            )
        )
    if tokens > 64 and n % 8 == 0:
        found += wide_candidates(tokens, n, sm_count)
    if tokens >= 64 and whole:
        found += large_candidates() if int8 else [LinearConfig("scaled_mm")]
    if int8:  # int8 sums are exact
        found = [replace(config, promote=0) for config in found if config.kernel != "scaled_mm"]
    distinct: dict[tuple[LinearConfig, WorkSplit], LinearConfig] = {}
    for config in found:  # several settings may give the same launch
        distinct.setdefault((replace(config, ctas=0, split=False), work_split(config, tokens, n, k, sm_count)), config)
    return [config for (_, work), config in distinct.items() if work.parts <= MAX_PARTS]
