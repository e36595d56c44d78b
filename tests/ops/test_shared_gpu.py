"""Kernels on a GPU that several processes share: time slices stop their warps anywhere, and each launch gives the same
bits all the same. Alone on a GPU a ring that is filled too early is hardly ever seen.
"""

import multiprocessing
import time
from collections.abc import Callable

import pytest
import torch
from sidestream.ops.attention.paged_attention import paged_attention
from sidestream.ops.elementwise.quantize_blocks import padded_scales
from sidestream.ops.linear.linear_8bit import linear_8bit
from support.attention import make_batch
from support.checks import bits, poison
from support.linears import BF16, E4M3, inputs

INT8 = torch.int8
PROCESSES, SECONDS, LAUNCHES = 5, 20.0, 8


def linear_with_block_scales() -> Callable[[torch.Tensor], None]:
    """The output projection of an 8B model for 64 tokens."""
    tokens, n, k = 64, 128256, 4096
    q, _, *rest = inputs(tokens, n, k, "cuda", False, E4M3)
    scale = torch.rand(k // 128, padded_scales(tokens), device="cuda") + 0.5
    return lambda out: linear_8bit.launch(q, scale, *rest, BF16, out=(out,), sm_budget=99, pdl=True)


def attention(count: int) -> Callable[[torch.Tensor], None]:
    """Eight sequences of 1,000 tokens in an int8 cache, the last `count` of each as queries."""
    batch = make_batch([1000] * 8, [count] * 8, heads=32, kv_heads=8, dim=128, cache=INT8, device="cuda")
    args = batch.args(False, count == 1)
    return lambda out: paged_attention.launch(*args, out=(out,), pdl=True)


SUBJECTS: dict[str, tuple[Callable[[], Callable[[torch.Tensor], None]], tuple[int, int]]] = {
    "a linear with scales of blocks": (linear_with_block_scales, (64, 128256)),
    "decode attention": (lambda: attention(1), (8, 4096)),
    "prompt attention": (lambda: attention(200), (1600, 4096)),
}


def differing(name: str, seed: int) -> tuple[int, int]:
    """(launches that differ from the first one, launches) within SECONDS."""
    torch.manual_seed(seed)
    make, shape = SUBJECTS[name]
    launch, first = make(), None
    found, launches, end = 0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        outs = [poison(torch.empty(shape, dtype=BF16, device="cuda")) for _ in range(LAUNCHES)]
        for out in outs:
            launch(out)
        first = outs[0].clone() if first is None else first
        found += sum(not torch.equal(bits(out), bits(first)) for out in outs)
        launches += len(outs)
    return found, launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUBJECTS)
def test_other_processes_change_no_bit(name: str) -> None:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        results = pool.starmap(differing, [(name, seed) for seed in range(PROCESSES)])
    assert all(launches > LAUNCHES for _, launches in results)
    assert [found for found, _ in results] == [0] * PROCESSES
