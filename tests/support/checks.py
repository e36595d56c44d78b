"""Does a kernel compute what its op's reference says?

    from support.checks import check_kernel

    check_kernel(OPS["rms_norm"], x, weight, 1e-5)                                 # Triton's interpreter on CPU
                                                                                   tensors, the GPU on CUDA ones
    check_kernel(OPS["append_kv"], k, v, cache, scales, slots, pdl=True)           # launch options pass through
    check_kernel(OPS["sample"], *args, tolerances={0: EXACT})                      # per output, by position (mutated
                                                                                   arguments by name)

Outputs are poisoned before the launch (NaN; the byte 0x7f for integers, which is NaN in e4m3 too), mutated arguments
are compared with the reference's, every other argument must stay as it was, and a second launch must give the same
bits. Defaults by dtype: fp32 1e-5, bf16 one step, e4m3 and int8 one step in at most 2% of the elements (compared as
stored, without their scales).
"""

from dataclasses import dataclass
from typing import Any

import torch
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.ops.core.registry import Op, as_outputs

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= atol + rtol * |expected| for each element."""

    rtol: float = 0.0
    atol: float = 0.0
    differing: float = 1.0  # the fraction of elements that may differ at all


EXACT = Tolerance()
DEFAULTS = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(2.0**-7, 1e-5),
    torch.float16: Tolerance(2.0**-10, 1e-6),
    torch.float8_e4m3fn: Tolerance(2.0**-3, 2.0**-9, differing=0.02),
    torch.int8: Tolerance(0.0, 1.0, differing=0.02),
}


def stored_tolerances(dtype: torch.dtype, tokens: int, pages: int) -> dict[int | str, Tolerance]:
    """For ops that fill a KV cache of `pages` pages with `tokens` tokens: one step in at most 2% of the elements
    that are written.
    """
    step = {torch.int8: (0.0, 1.0), torch.float8_e4m3fn: (2.0**-3, 2.0**-9), torch.bfloat16: (2.0**-7, 2e-6)}[dtype]
    return {"kv_cache": Tolerance(*step, differing=0.02 * tokens / (pages * PAGE_SIZE)), "kv_scales": Tolerance(1e-5)}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that no kernel may leave behind."""
    if tensor.dtype in _FP8 or not tensor.dtype.is_floating_point:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float("nan"))
    return tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, for comparing NaN and -0.0 as they are."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance | None = None, name: str = "output"
) -> None:
    """Fail unless `actual` is `expected` within the tolerance (default: by dtype), saying how far off it is and
    where.
    """
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, the reference has {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, the reference has {expected.dtype}"
    tolerance = tolerance or DEFAULTS.get(expected.dtype, EXACT)
    if actual.numel() == 0:
        return
    got, want = actual.double(), expected.double().to(actual.device)
    error = (got - want).abs()
    error[got == want] = 0.0  # equal infinities
    error[got.isnan() & want.isnan()] = 0.0
    excess = error - (tolerance.atol + tolerance.rtol * want.abs().nan_to_num(0.0, 0.0))
    wrong = ~(excess <= 0)  # NaN counts as wrong
    if wrong.any():
        flat = torch.where(excess.isnan(), torch.full_like(excess, float("inf")), excess).flatten().argmax()
        where = tuple(int(i) for i in torch.unravel_index(flat, actual.shape))
        count = f"{int(wrong.sum())} of {wrong.numel()} elements are off"
        places = [[*dict.fromkeys(each.tolist())] for each in wrong.nonzero(as_tuple=True)]  # a tile, or one token?
        count += f" (along each dimension: {[len(each) for each in places]}, from {[min(each) for each in places]})"
        raise AssertionError(
            f"{name}: {count}; worst at {where}: {float(got[where])}, the reference has {float(want[where])}"
        )
    differing = float((error > 0).double().mean())
    assert differing <= tolerance.differing, (
        f"{name}: {differing:.1%} of the elements differ, {tolerance.differing:.1%} may"
    )


def check_kernel(
    op: Op, *args: Any, tolerances: dict[int | str, Tolerance] | None = None, **launch_options: Any
) -> tuple[torch.Tensor, ...]:
    """Launch `op` on poisoned outputs, compare with its reference, and return the outputs."""
    tolerances = tolerances or {}
    names = [argument.name for argument in op.overload._schema.arguments]
    expected_args, kernel_args, again_args = (_copies(args) for _ in range(3))
    expected = as_outputs(op.reference(*expected_args))
    actual = _launch(op, kernel_args, launch_options)
    assert len(actual) == len(expected), f"{op.name} allocates {len(actual)} outputs, the reference has {len(expected)}"
    for position, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_near(got, want, tolerances.get(position), f"{op.name} output {position}")
    for name, before, got, want in zip(names, args, kernel_args, expected_args, strict=False):
        if not isinstance(before, torch.Tensor):
            continue
        if name in op.mutates:
            assert_near(got, want, tolerances.get(name), f"{op.name} argument {name}")
        else:
            assert torch.equal(bits(got), bits(before)), f"{op.name} changed its argument {name}"
    again = _launch(op, again_args, launch_options)
    for first, second in zip((*actual, *_tensors(kernel_args)), (*again, *_tensors(again_args)), strict=True):
        assert torch.equal(bits(first), bits(second)), f"{op.name} gives other bits at a second launch"
    return actual


def _launch(op: Op, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    out = tuple(poison(tensor) for tensor in as_outputs(op.fake(*args)))
    op.launch(*args, out=out, **options)
    if any(tensor.is_cuda for tensor in _tensors(args)):
        torch.cuda.synchronize()
    return out


def _copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_copy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also of a view into a wider row."""
    if tensor.is_contiguous():
        return tensor.clone()
    span = (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )
    storage = tensor.as_strided((span,), (1,)).clone()
    return storage.as_strided(tensor.shape, tensor.stride(), 0)


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]
