"""Which kernel and which tiles a linear runs with: measured choices from `tuned/*.json`, a heuristic for shapes that were never measured."""
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from .triton_support import cdiv, next_power_of_2

Kernel = Literal["triton", "gluon", "scaled_mm"]
TUNED = Path(__file__).parent / "tuned" / "h200.json"
SCALED_MM_TOKENS = 256  # above this many tokens arithmetic, not bytes, is the limit
WIDE = 16384  # from this many outputs on there are several tiles for each SM
H200_SMS = 132
RING_BYTES = 190 * 1024  # shared memory that a kernel's ring may take, per SM
MAX_UNEVENNESS = 1.15  # the longest share of whole tiles, over the mean, from which on tiles are cut
BLOCK_K = 128  # columns of K that a step reads: 128 bytes, the widest TMA swizzle
MAX_PARTS = 8  # more programs than that on one tile spend their time adding planes
MAX_TILES = 1 << 16  # tiles of a launch that cuts tiles between programs: one arrival counter each
MAX_UNITS = 2**31 - 1  # units x programs is computed in 32 bits


@dataclass(frozen=True)
class LinearConfig:
    """How one linear_fp8 is launched.

    A tile is `block_n` weight rows x `block_t` tokens, read `block_k` columns at a time through a ring of `stages` buffers by `warps` warps.
    `ctas_per_sm` programs are launched per SM, at most `ctas` in all (0 = no such limit). `split` always cuts the work into even shares, through
    tiles where need be; otherwise that is done only where whole tiles would be shared out too unevenly.
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


@dataclass(frozen=True)
class WorkSplit:
    """How a launch divides its work: `programs` in the grid, at most `parts` (a power of two) of them share one tile, `split` if any do."""

    programs: int
    parts: int
    split: bool


@lru_cache(maxsize=4096)
def work_split(config: LinearConfig, tokens: int, n: int, k: int, sms: int) -> WorkSplit:
    """The grid of a launch on `sms` SMs (the whole GPU's, or a budget)."""
    steps = cdiv(k, config.block_k)
    tiles = cdiv(n, config.block_n) * cdiv(tokens, config.block_t)
    units = tiles * steps
    whole = min(sms * config.ctas_per_sm, config.ctas or MAX_UNITS, tiles)
    uneven = cdiv(tiles, whole) * whole > MAX_UNEVENNESS * tiles  # some programs would hold a tile more than others, for too long
    if tiles > MAX_TILES or not (config.split or uneven):
        return WorkSplit(whole, 1, False)
    programs = min(sms * config.ctas_per_sm, config.ctas or MAX_UNITS, units, tiles * MAX_PARTS, max(1, MAX_UNITS // units - 1))
    parts = max(((t + 1) * steps * programs - 1) // units - ((t * steps + 1) * programs - 1) // units + 1 for t in range(tiles))
    return WorkSplit(programs, next_power_of_2(parts), parts > 1)


@lru_cache(maxsize=1)
def tuned_table() -> dict[tuple[int, int, int], LinearConfig]:
    """(N, K, padded tokens) -> the fastest configuration measured on an H200."""
    table = {}
    for shape in json.loads(TUNED.read_text())["linear_fp8"]:
        for tokens, config in shape["tokens"].items():
            table[shape["n"], shape["k"], int(tokens)] = LinearConfig(**config)
    return table


def padded_tokens(tokens: int) -> int:
    """The power of two (>= 16) under which a token count is tuned."""
    return max(16, next_power_of_2(tokens))


def ring_stages(block_n: int, block_t: int, ctas_per_sm: int) -> int:
    """How many buffers of one tile's weights and activations fit an SM's shared memory."""
    return max(2, min(16, RING_BYTES // ctas_per_sm // ((block_n + block_t) * BLOCK_K)))


def consumer_warps(block_n: int, block_t: int) -> int:
    """4, or 8 where the running sums of one tile would take more than 64 registers a thread."""
    return 8 if block_n * block_t > 64 * 128 else 4


def most_registers(warps: int, ctas_per_sm: int) -> int:
    """Registers a thread (the producer's warpgroup counts too) with which `ctas_per_sm` programs and a small neighbour fit an SM."""
    if ctas_per_sm > 1:
        return 128 if warps == 4 else 80
    return 168 if warps == 4 else 152


def choose_config(tokens: int, n: int, k: int, sm_count: int, scaled_mm: bool = True) -> LinearConfig:
    """A configuration for a shape that was never measured, by what won on the shapes that were.

    `scaled_mm` says whether `torch._scaled_mm` may be chosen (it takes not every shape and result dtype).
    """
    if scaled_mm and (tokens > 128 or (tokens > 64 and n >= WIDE)):
        return LinearConfig("scaled_mm")
    block_t = min(128, padded_tokens(tokens))
    if tokens > SCALED_MM_TOKENS:
        block_n, ctas_per_sm, ctas, split = 128, 1, 0, False
    elif n >= WIDE:  # several tiles an SM: leave them whole, two programs take turns
        block_n, ctas_per_sm, ctas, split = 128, 1 if block_t > 64 else 2, 0, False
    else:  # small tiles: about one an SM, else each cut between as many programs as there are SMs for
        block_n, ctas_per_sm = 64, 1
        tiles = cdiv(n, block_n) * cdiv(tokens, block_t)
        split = not 0.65 * sm_count <= tiles <= sm_count
        aligned = sm_count // tiles * tiles
        ctas = aligned if split and aligned > 0.9 * sm_count else 0
    stages, warps = ring_stages(block_n, block_t, ctas_per_sm), consumer_warps(block_n, block_t)
    return LinearConfig("gluon", block_n, block_t, BLOCK_K, stages, warps, ctas_per_sm, ctas, split, most_registers(warps, ctas_per_sm))


def without_tma(config: LinearConfig) -> LinearConfig:
    """The Triton kernel with a Gluon configuration's tiles: for the interpreter, and for tensors that don't begin on 16 bytes."""
    return replace(config, kernel="triton", stages=max(2, min(4, config.stages)), max_registers=0)


def linear_config(tokens: int, n: int, k: int, sm_count: int, scaled_mm: bool = True) -> LinearConfig:
    """The measured configuration where there is one, else `choose_config`'s."""
    tuned = tuned_table().get((n, k, padded_tokens(tokens)))
    if tuned is None or (tuned.kernel == "scaled_mm" and not scaled_mm):
        return choose_config(tokens, n, k, sm_count, scaled_mm)
    return tuned


def candidates(tokens: int, n: int, k: int, sm_count: int) -> list[LinearConfig]:
    """Configurations worth measuring for this shape on a GPU of `sm_count` SMs."""
    block_t = min(128, padded_tokens(tokens))
    found = [choose_config(tokens, n, k, sm_count)]
    for block_n, ctas_per_sm in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1)):
        tiles = cdiv(n, block_n) * cdiv(tokens, block_t)
        slots = sm_count * ctas_per_sm
        # Even cuts over the whole GPU; whole tiles; or a whole number of programs a tile: fewer exchanges, some SMs idle.
        grids = [(slots, True), (slots, False), *((tiles * cuts, True) for cuts in (1, 2, 3, 4, 6, 8) if 0.65 * slots <= tiles * cuts <= slots)]
        warps = consumer_warps(block_n, block_t)
        if warps * ctas_per_sm > 8:
            continue  # the registers of two such programs don't fit an SM
        deepest = ring_stages(block_n, block_t, ctas_per_sm)
        for ctas, cut in grids:
            for stages in dict.fromkeys((deepest, max(2, deepest * 2 // 3))):
                found.append(LinearConfig("gluon", block_n, block_t, BLOCK_K, stages, warps, ctas_per_sm, ctas, cut, most_registers(warps, ctas_per_sm)))
    for block_n, ctas_per_sm, cut in ((64, 2, True), (64, 3, True), (64, 4, True), (64, 4, False), (128, 2, True)):
        found.append(LinearConfig("triton", block_n, block_t, BLOCK_K, 4, consumer_warps(block_n, block_t), ctas_per_sm, split=cut))
    if tokens >= 64 and n % 16 == 0:
        found.append(LinearConfig("scaled_mm"))
    distinct: dict[tuple[LinearConfig, WorkSplit], LinearConfig] = {}
    for config in found:  # several settings may come to the same launch
        distinct.setdefault((replace(config, ctas=0, split=False), work_split(config, tokens, n, k, sm_count)), config)
    return [config for (_, work), config in distinct.items() if work.parts <= MAX_PARTS]
