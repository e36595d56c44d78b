"""Time attention of a short chunk over a long cached context, with different numbers of splits of the context.

    python -m sidestream.tools.dev.bench.prompt_splits                        # heads of Llama-3.1-8B, int8
    python -m sidestream.tools.dev.bench.prompt_splits --cache fp8_e4m3 --chunks 32 --contexts 8192
    python -m sidestream.tools.dev.bench.prompt_splits --dry-run              # cases and bytes, without a GPU

A row is one chunk at the end of one sequence, in the program of a step: tokens are padded to 64, and seven sequences
are empty. "chosen" is the number of splits that the kernel chooses; other columns force a number, where the GPU has
enough SMs for it. The floor is the time to read the keys and values. Launches take turns on copies of the cache that do
not fit in the L2 cache, in a CUDA graph.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import torch

from ....compiler.cost.hardware import H200, gpu_of
from ....ops.attention import prefill_gluon
from ....ops.attention.prefill_gluon_tiles import STEP
from ....ops.core.device import multiprocessors
from ....ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape
from ....ops.core.triton_support import cdiv
from ...bench.kernels_attention import HEAD_DIM, HEADS, KV_HEADS, L2_BYTES, moved_bytes
from ...bench.layer import launch_us

CACHES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
SEQUENCES = 8
TOKENS = 64  # in the smallest program of a prompt's step


def steps_of_split(chunk: int, context: int, programs: int) -> int:
    """Return the maximum steps of a split that the kernel chooses for one sequence, as `plan_splits` computes it."""
    tile = prefill_gluon.tile_tokens(HEADS, KV_HEADS)
    tiles, work = cdiv(chunk, tile), cdiv(chunk, tile) * cdiv(context, int(STEP)) * KV_HEADS
    padding = cdiv(max(0, TOKENS - chunk), tile)
    budget = max(programs - (tiles + padding) * KV_HEADS, programs // 2)
    return max(cdiv(work, budget), prefill_gluon.MIN_STEPS)


def splits_of(context: int, steps: int) -> int:
    """Return the number of splits of at most `steps` steps."""
    return cdiv(cdiv(context, int(STEP)), steps)


def random_cache(pages: int, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a KV cache of random values, and its scales."""
    kv = torch.randint(-100, 101, kv_cache_shape(pages, KV_HEADS, HEAD_DIM), dtype=torch.int8, device="cuda")
    scales = torch.rand(kv_scales_shape(pages, KV_HEADS), device="cuda") * 0.02 + 0.01
    return kv.to(CACHES[cache]), scales


class Launches:
    """Launches of a chunk over copies of a random cache."""

    def __init__(self, chunk: int, context: int, cache: str) -> None:
        pages, tokens = cdiv(context, PAGE_SIZE), max(chunk, TOKENS)
        table = torch.zeros(SEQUENCES, pages, dtype=torch.int32, device="cuda")
        table[0] = torch.randperm(pages)
        lens = torch.tensor([context] + [0] * (SEQUENCES - 1), dtype=torch.int32, device="cuda")
        starts = torch.tensor([0] + [chunk] * SEQUENCES, dtype=torch.int32, device="cuda")
        q = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.out = q.new_empty(tokens, HEADS * HEAD_DIM)
        self.arguments = []
        for _ in range(min(16, 1 + int(L2_BYTES // moved_bytes([context], cache)))):
            kv = random_cache(pages, cache)
            self.arguments.append((q, *kv, table, lens, starts, HEAD_DIM**-0.5, cache != "int8"))

    def us(self, split: bool, repeats: int) -> float:
        """Return microseconds per launch."""
        launches = [partial(prefill_gluon.launch, *given, self.out, False, split=split) for given in self.arguments]
        launches[0]()  # compile
        return launch_us(launches, 1, repeats)


def row(chunk: int, context: int, cache: str, splits: Sequence[int], repeats: int) -> str:
    """Return the times of one chunk: without splits, with the kernel's choice, and with each number of splits."""
    launches = Launches(chunk, context, cache)
    programs = multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    chosen = steps_of_split(chunk, context, programs)
    cells = [f"{launches.us(False, repeats):8.1f}", f"{launches.us(True, repeats):8.1f}"]
    cells.append(f"{splits_of(context, chosen):6d}")
    for count in splits:
        steps = cdiv(cdiv(context, int(STEP)), count)
        with patch.object(prefill_gluon, "MIN_STEPS", steps):
            fits = steps_of_split(chunk, context, programs) == steps  # else there are more items than SMs
            cells.append(f"{launches.us(True, repeats):8.1f}" if fits else f"{'-':>8}")
    return " ".join(cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", choices=CACHES, default="int8", help="dtype of the KV cache")
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 32, 64, 128, 512], help="tokens of the chunk")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens in the cache")
    parser.add_argument("--splits", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="forced numbers of splits")
    parser.add_argument("--repeats", type=int, default=10, help="replays per measurement")
    parser.add_argument("--dry-run", action="store_true", help="print cases, floors and the kernel's choice")
    options = parser.parse_args(argv)
    gpu = H200 if options.dry_run else gpu_of()
    forced = " ".join(f"{f'{count}, us':>8}" for count in options.splits)
    print(f"cache {options.cache}, {HEADS} query heads on {KV_HEADS} KV heads of {HEAD_DIM}, one layer")
    print(f"context chunk floor,us whole,us split,us chosen {forced}", flush=True)
    for context in options.contexts:
        for chunk in options.chunks:
            floor = moved_bytes([context], options.cache) / gpu.bytes_per_second() * 1e6
            if options.dry_run:
                chosen = splits_of(context, steps_of_split(chunk, context, multiprocessors(torch.device("cpu"))))
                cells = f"{'-':>8} {'-':>8} {chosen:6d}"
            else:
                cells = row(chunk, context, options.cache, options.splits, options.repeats)
            print(f"{context:7d} {chunk:5d} {floor:8.1f} {cells}", flush=True)


if __name__ == "__main__":
    main()
