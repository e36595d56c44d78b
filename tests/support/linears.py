"""Inputs, launches and tolerances for tests of the 8-bit linears."""

from typing import Any

import torch
from sidestream.ops.core.device import H200_SMS
from sidestream.ops.core.registry import Op
from sidestream.ops.linear.kernel_selection import LinearConfig
from sidestream.ops.linear.linear_8bit import launch_config, linear_8bit

from support.checks import Tolerance, poison

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
INT8_DEVIATION = 73.0  # of whole numbers from -127 to 127, all as likely
# Outputs are of order 1. Blocks of 128 products are added with 14 bits and then in fp32; with fast accumulation all K
# of them have 14 bits.
NEAR = Tolerance(rtol=2.0**-7, atol=4e-3)
FAST_ACCUMULATION = Tolerance(rtol=2.0**-6, atol=1e-1)
# What a test of every shape should try: Llama-3.1-8B's, small ones, odd ones, larger models'.
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (256, 256),
    (64, 14336),
    (100, 208),
    (1, 16),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
]


def inputs(
    tokens: int, n: int, k: int, device: str = "cpu", addends: bool = True, dtype: torch.dtype = E4M3
) -> tuple[Any, ...]:
    """(q, scale, weight, weight_scale, delta, residual) whose outputs are of order 1; int8 operands hold every value
    from -127 to 127.
    """
    if dtype == torch.int8:
        q, weight = (torch.randint(-127, 128, (rows, k), device=device, dtype=dtype) for rows in (tokens, n))
    else:
        q, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (tokens, n))
    scale, weight_scale = torch.rand(tokens, device=device) + 0.5, (torch.rand(n, device=device) + 0.5) / k**0.5
    if dtype == torch.int8:
        weight_scale /= INT8_DEVIATION**2
    more = [torch.randn(tokens, n, device=device).to(BF16) if addends else None for _ in range(2)]
    return (q, scale, weight, weight_scale, *more)


def run(
    config: LinearConfig, args: tuple[Any, ...], dtype: torch.dtype, sms: int = H200_SMS, **options: Any
) -> torch.Tensor:
    """The poisoned output after a launch of `config`."""
    out = poison(torch.empty(args[0].shape[0], args[2].shape[0], dtype=dtype, device=args[0].device))
    launch_config(config, *args, out, sms=sms, **options)
    return out


def tolerance(config: LinearConfig, dtype: torch.dtype = E4M3) -> Tolerance:
    if dtype == torch.int8:
        return NEAR
    return (
        FAST_ACCUMULATION if config.kernel == "scaled_mm" or (config.kernel == "wide" and not config.promote) else NEAR
    )


def check_chain(
    quantizer: Op, dtype: torch.dtype, weights: list[tuple[torch.Tensor, torch.Tensor]], tokens: int
) -> None:
    """Quantize -> linear -> quantize ... under PDL and in a CUDA graph, every buffer used again at once: an early
    read or write would change the result.
    """
    start = torch.randn(tokens, weights[0][0].shape[1], device="cuda").to(BF16)
    hidden, (q, scale) = torch.empty_like(start), quantizer.fake(start, dtype)

    def chain(pdl: bool, wait: bool = False) -> None:
        hidden.copy_(start)
        for weight, weight_scale in weights:
            quantizer.launch(hidden, dtype, out=(q, scale), pdl=pdl)
            linear_8bit.launch(q, scale, weight, weight_scale, None, None, BF16, out=(hidden,), pdl=pdl)
            if wait:
                torch.cuda.synchronize()

    chain(False, wait=True)
    expected = hidden.clone()
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(10):
        poison(hidden)
        graph.replay()
        assert torch.equal(hidden, expected)
    assert expected.isfinite().all() and expected.std() > 0.01
