"""The exact product of int8 matrices, for references: the same sums whatever else is in the batch."""

from functools import cache

import torch

EXACT_COLUMNS = 1024  # so many products of int8 add up to at most 2^24: fp32 holds every sum on the way
CHUNK_ELEMENTS = 1 << 24  # of a weight, in fp32 at a time: 64 MB


def int8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] int8 @ weight [N, K]^T int8 -> [..., N] int32, exact where the sums fit."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    product = torch._int_mm(rows, weight.t()) if _takes_int_mm(x.device) else product_by_fp32(rows, weight)
    return product.view(*x.shape[:-1], weight.shape[0])


def product_by_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] int8 @ weight [N, K]^T int8 -> [T, N] int32, with products in fp32 of as many columns as are exact."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT_COLUMNS):
        columns = slice(start, start + EXACT_COLUMNS)
        some = x[:, columns].float()
        parts = [some @ rows.float().t() for rows in weight[:, columns].split(CHUNK_ELEMENTS // EXACT_COLUMNS)]
        total += torch.cat(parts, dim=1).to(torch.int32)
    return total


def _takes_int_mm(device: torch.device) -> bool:
    return device.type == "cpu" and _int_mm_is_exact()


@cache
def _int_mm_is_exact() -> bool:
    """Whether `torch._int_mm` is: on CPUs without VNNI its library may add pairs of products in 16 bits."""
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    smallest = torch.full((64, 64), -128, dtype=torch.int8)
    pairs = ((a, b) for a in (largest, smallest) for b in (largest, smallest))
    return all(torch.equal(torch._int_mm(a, b), product_by_fp32(a, b)) for a, b in pairs)
