"""Time decode attention of requests with the same prefix: read by each, read once, and without the prefix.

    python -m sidestream.tools.dev.bench.shared_prefix                        # heads of Llama-3.1-8B, int8
    python -m sidestream.tools.dev.bench.shared_prefix --cache fp8_e4m3 --requests 256 --shared 1024

"each" is decode attention as without `cascade_attention`; "once" is prefix_attention and the attention that merges its
result; "none" is decode attention of the other tokens alone. All in microseconds per layer. Launches take turns on
copies of the cache in a CUDA graph, with programmatic dependent launch.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ....ops.attention.paged_attention import paged_attention
from ....ops.attention.prefill_gluon import tile_tokens
from ....ops.attention.prefix_attention import prefix_attention, prefix_plan
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.core.triton_support import cdiv
from ...bench.kernels_attention import HEAD_DIM, HEADS, KV_HEADS
from ...bench.layer import launch_us
from .prompt_splits import CACHES, random_cache

COPIES = 4


class Step:
    """Decode attention of `requests` requests, of which the first `shared` of `context` tokens are the same."""

    def __init__(self, requests: int, shared: int, context: int, cache: str) -> None:
        common = shared // PAGE_SIZE
        own = cdiv(context, PAGE_SIZE) - common
        pages = common + requests * own
        table = common + torch.arange(requests * own, dtype=torch.int32).view(requests, own)
        table = torch.cat([torch.arange(common, dtype=torch.int32).expand(requests, common), table], 1)
        self.table = torch.randperm(pages)[table.long()].int().cuda()
        self.lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.q = torch.randn(requests, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.out = self.q.new_empty(requests, HEADS * HEAD_DIM)
        self.plan = prefix_plan(self.table, self.lens, tile_tokens(HEADS, KV_HEADS))
        self.caches = [random_cache(pages, cache) for _ in range(COPIES)]

    def launch(self, cache: tuple[torch.Tensor, torch.Tensor], once: bool) -> None:
        """Run attention, with shared pages read once or by each request."""
        own, scale = (self.q, *cache, self.table), HEAD_DIM**-0.5
        prefix: tuple[Any, ...] = ()
        if once:
            prefix = prefix_attention.fake(*own, self.plan, scale)
            prefix_attention.launch(*own, self.plan, scale, out=prefix, pdl=True)
            prefix = (None, None, 0, 0, False, *prefix, self.plan)
        paged_attention.launch(*own, self.lens, self.starts, scale, False, True, *prefix, out=(self.out,), pdl=True)

    def us(self, once: bool, repeats: int) -> float:
        """Return microseconds per launch."""
        launches = [partial(self.launch, cache, once) for cache in self.caches]
        launches[0]()
        return launch_us(launches, 2, repeats)


def row(requests: int, shared: int, own: int, cache: str, repeats: int) -> str:
    """Return the times of one case."""
    cases = ((shared, False), (shared, True), (0, False))
    times = (Step(requests, common, common + own, cache).us(once, repeats) for common, once in cases)
    return " ".join(f"{us:8.1f}" for us in times)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", choices=CACHES, default="int8", help="dtype of the KV cache")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 128, 256], help="requests of a step")
    parser.add_argument("--shared", type=int, nargs="+", default=[256, 1024, 4096], help="tokens of the prefix")
    parser.add_argument("--own", type=int, default=256, help="other tokens of each request")
    parser.add_argument("--repeats", type=int, default=10, help="replays per measurement")
    options = parser.parse_args(argv)
    print(f"cache {options.cache}, {HEADS} query heads on {KV_HEADS} KV heads of {HEAD_DIM}, us per layer")
    print(f"requests shared   own {'each':>8} {'once':>8} {'none':>8}", flush=True)
    for requests in options.requests:
        for shared in options.shared:
            measured = row(requests, shared, options.own, options.cache, options.repeats)
            print(f"{requests:8d} {shared:6d} {options.own:5d} {measured}", flush=True)


if __name__ == "__main__":
    main()
