"""Attention in `sidestream bench kernels`: decode and prefill of Llama-3.1-8B's heads, for each cache dtype.

Decode is compared with the time for keys, values, scales, queries and results at the memory's bandwidth, prefill with
the peak of the tensor cores: for an e4m3 cache half of the operations in e4m3, else all in 16 bits. Pages are in random
order. The launches of a row run in a row in a CUDA graph, over copies of a cache that fits in the L2 cache.

Prefill over an int8 cache includes widen_kv, as in prompt programs; "int8 by tile" is attention alone, which converts
the keys and values itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .layer import launch_us

if TYPE_CHECKING:
    from ...compiler.cost.hardware import Gpu

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CACHES = ("fp8_e4m3", "int8", "bf16")
BY_TILE = "int8 by tile"
WIDE_STEPS = 512  # size of a program's buffer
DECODE_SEQUENCES = (1, 8, 64, 256)
DECODE_CONTEXTS = (256, 1024, 8192, 32768)
DECODE_BYTES = 24e9  # larger caches are left out
RAGGED = tuple(64 << step for step in range(8)) * 8  # 64 sequences of 64..8192 tokens
L2_BYTES = 120e6
PREFILLS = {  # name -> (tokens in the cache, new ones among them) of each sequence
    "16 x 2048": ((2048, 2048),) * 16,
    "2048": ((2048, 2048),),
    "2048 after 8k": ((8192 + 2048, 2048),),
    "2048 after 32k": ((32768 + 2048, 2048),),
    "1536 + 64 decodes of 1024": ((1024, 1),) * 64 + ((1536, 1536),),
}


@dataclass(frozen=True)
class AttentionRow:
    """One launch: `rate` in GB/s (decode) or TFLOP/s (prefill), `share` of the GPU's peak (0.0: unknown)."""

    kind: str
    shape: str
    cache: str
    us: float
    rate: float
    share: float


def measure_attention(repeats: int, gpu: "Gpu") -> Iterator[AttentionRow]:
    """Yield every row of the table."""
    for cache in CACHES:
        for sequences in DECODE_SEQUENCES:
            for context in DECODE_CONTEXTS:
                if moved_bytes([context] * sequences, cache) <= DECODE_BYTES:
                    yield decode_row(f"{sequences} x {context}", [context] * sequences, cache, repeats, gpu)
        yield decode_row("64 x 64..8192", RAGGED, cache, repeats, gpu)
        for shape, sequences_of in PREFILLS.items():
            yield prefill_row(shape, sequences_of, cache, repeats, gpu)
            if cache == "int8":
                yield prefill_row(shape, sequences_of, BY_TILE, repeats, gpu)


def moved_bytes(contexts: Sequence[int], cache: str) -> int:
    """Return the bytes that a decode step reads and writes: keys and values with scales, query and result in bf16."""
    per_value = HEAD_DIM * 2 if cache == "bf16" else HEAD_DIM + 4
    return sum(contexts) * KV_HEADS * 2 * per_value + len(contexts) * HEADS * HEAD_DIM * 4


def operations(sequences: Sequence[tuple[int, int]]) -> int:
    """Return the operations of causal attention over sequences of (tokens in the cache, new ones among them)."""
    return sum(4 * HEADS * HEAD_DIM * (new * total - new * (new - 1) // 2) for total, new in sequences)


def decode_row(shape: str, contexts: Sequence[int], cache: str, repeats: int, gpu: "Gpu") -> AttentionRow:
    """Time decode attention for sequences of `contexts` tokens, next to the memory's bandwidth."""
    us = time_attention([(context, 1) for context in contexts], cache, repeats, decode=True)
    moved = moved_bytes(contexts, cache)
    share = moved / gpu.bytes_per_second() / us * 1e6
    return AttentionRow("decode", shape, cache, round(us, 2), round(moved / us / 1e3, 1), round(share, 3))


def prefill_row(shape: str, sequences: Sequence[tuple[int, int]], cache: str, repeats: int, gpu: "Gpu") -> AttentionRow:
    """Time prompts of (cached tokens, new tokens), next to the peak of the tensor cores."""
    us = time_attention(sequences, cache, repeats, decode=False)
    done = operations(sequences)
    in_16_bits = gpu.flops_per_second(2)
    peak = 2 / (1 / in_16_bits + 1 / gpu.flops_per_second(1)) if cache == "fp8_e4m3" else in_16_bits
    share = done / us * 1e6 / peak if gpu.known_rates else 0.0
    return AttentionRow("prefill", shape, cache, round(us, 2), round(done / us / 1e6, 1), round(share, 3))


def time_attention(sequences: Sequence[tuple[int, int]], cache: str, repeats: int, decode: bool) -> float:
    """Return microseconds per launch."""
    import torch

    from ...ops.attention.paged_attention import paged_attention
    from ...ops.attention.prefill_gluon import tile_tokens
    from ...ops.attention.widen_kv import widen_kv, widen_plan
    from ...ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape

    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, BY_TILE: torch.int8, "bf16": torch.bfloat16}[cache]
    owned = [-(-total // PAGE_SIZE) for total, _ in sequences]
    pages, tokens = sum(owned), sum(new for _, new in sequences)
    copies = min(8, 1 + int(L2_BYTES // moved_bytes([total for total, _ in sequences], cache))) if decode else 1
    shuffled = torch.randperm(pages).int()
    table = torch.zeros(len(sequences), max(owned), dtype=torch.int32)
    for row, (first, count) in enumerate(zip([0, *torch.tensor(owned).cumsum(0).tolist()], owned, strict=False)):
        table[row, :count] = shuffled[first : first + count]
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0).int().cuda()
    tables = (table.cuda(), torch.tensor([total for total, _ in sequences], dtype=torch.int32, device="cuda"), starts)
    q = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = q.new_empty(tokens, HEADS * HEAD_DIM)
    plan, listed = widen_plan(*tables, tile_tokens(HEADS, KV_HEADS), WIDE_STEPS)
    launches: list[Callable[[], None]] = []
    for _ in range(copies):
        stored = torch.empty(kv_cache_shape(pages, KV_HEADS, HEAD_DIM), dtype=torch.int8, device="cuda").random_(
            -100, 101
        )
        kv = stored
        if dtype != torch.int8:
            kv = torch.empty_like(stored, dtype=dtype)
            for target, source in zip(kv.split(4096), stored.split(4096), strict=True):
                target.copy_(source / 50)
        scales = None if cache == "bf16" else torch.rand(kv_scales_shape(pages, KV_HEADS), device="cuda") * 0.02 + 0.01

        widens = cache == "int8" and not decode
        wide = widen_kv.fake(kv, scales, listed) if widens else None

        def launch(kv: Any = kv, scales: Any = scales, wide: Any = wide) -> None:
            if wide is not None:
                widen_kv.launch(kv, scales, listed, out=(wide,))
            paged_attention.launch(
                q,
                kv,
                scales,
                *tables,
                HEAD_DIM**-0.5,
                not decode,
                decode,
                wide,
                None if wide is None else plan,
                out=(out,),
            )

        launches.append(launch)
    for run in launches:
        run()  # compile
    return launch_us(launches, max(1, 16 // copies) if decode else 1, repeats)
