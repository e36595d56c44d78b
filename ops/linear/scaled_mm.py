"""linear_8bit for many tokens, bound by arithmetic: `torch._scaled_mm` with rowwise scales, then the addends.

Fast accumulation is on: the tensor cores keep the running sum, as in the decode kernels. cuBLAS rounds the product to
bf16 before the addends, one rounding more than the reference.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.triton_support import cdiv

ADD_BLOCK = 2048


def scaled_mm_takes(n: int, k: int, out_dtype: torch.dtype, dtype: torch.dtype = torch.float8_e4m3fn) -> bool:
    """Return whether `torch._scaled_mm`, or for int8 the kernel that replaces it, supports this rowwise product.

    N and K must be multiples of 16 and results bf16, for int8 also fp16.
    """
    results = (torch.bfloat16, torch.float16) if dtype == torch.int8 else (torch.bfloat16,)
    return n % 16 == 0 and k % 16 == 0 and out_dtype in results


@triton.jit
def _add_in_place(
    out_ptr, delta_ptr, residual_ptr, count, HAS_DELTA: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(out_ptr + offsets, mask=inside).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta_ptr + offsets, mask=inside).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


@contextmanager
def _sms_left_free(count: int) -> Iterator[None]:
    """Set cuBLAS to leave `count` SMs free within the context; the setting is process-wide."""
    if count <= 0:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def launch_scaled_mm(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out: torch.Tensor,
    sms_left_free: int = 0,
) -> None:
    """Fill out [T, N] bf16, for products that `scaled_mm_takes`.

    q [T, K], scale [T], weight [N, K], weight_scale [N], delta and residual [T, N].
    """
    with _sms_left_free(sms_left_free):
        torch._scaled_mm(
            q,
            weight.t(),
            scale.unsqueeze(1),
            weight_scale.unsqueeze(0),
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )
    if delta is not None or residual is not None:
        _add_in_place[(cdiv(out.numel(), ADD_BLOCK),)](
            out, out if delta is None else delta, out if residual is None else residual, out.numel(),
            HAS_DELTA=delta is not None, HAS_RESIDUAL=residual is not None, BLOCK=ADD_BLOCK, num_warps=8,
        )  # fmt: skip
