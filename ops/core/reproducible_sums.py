"""Products, sums and exponentials for CPU references, with bits that do not depend on the batch.

A library's GEMM chooses its kernel, and with it the order of its sums, by the number of rows and threads and by the
processor. Here every result equals a sum in one fixed order (`sum_in_order`, in fp64), rounded to the result's dtype.
A GEMM in fp64 computes the sums with an error bound: if all values within the bound round to the same result, the order
does not matter (rounding test of Ziv, "Fast evaluation of elementary mathematical functions with correctly rounded last
bit", 1991). The few other elements are summed again in the fixed order.

Elementwise functions use only additions, multiplications, divisions and roundings, which IEEE 754 defines exactly.
torch's own are not reproducible: `torch.sigmoid` and `torch.nn.functional.silu` compute the last elements of a tensor
with other code than the rest.
"""

import math

import torch

UNIT = 2.0**-53  # largest relative error of an fp64 operation
# products of these dtypes, and sums of 2**17 of them, have at most 53 bits: fp64 sums are exact in any order
EXACT = frozenset({torch.float8_e4m3fn, torch.int8})
MOST_EXACT = 1 << 17
SUM_BLOCK = 256
BLOCK_ELEMENTS = 1 << 18  # elements in fp64 at a time: 2 MiB
LEAST_BLOCK_ROWS = 64
EXP_ELEMENTS = 1 << 15
LOG2_E = math.log2(math.e)
POWERS = [math.log(2.0) ** order / math.factorial(order) for order in range(10)]  # Taylor series of 2**x


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `functional.linear`: x [..., K], weight [N, K], bias [N] -> [..., N] in x's dtype, rounded once."""
    return product(x, weight, x.dtype, bias)


def mm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `torch.mm`: x [T, K], other [K, N] -> [T, N] in x's dtype, rounded once."""
    return product(x, other.T, x.dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    divisor: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Return (x [..., T, K] @ weight [..., N, K]^T + bias [N]) / divisor -> [..., T, N] in `dtype`.

    The divisor is positive: a number or [..., T, 1]. Operands are fp64, fp32, 16-bit, e4m3 or int8. The weight has x's
    leading dimensions or none; without them about `BLOCK_ELEMENTS` of it are converted to fp64 at a time. NaN and
    infinity affect only their own rows and columns.
    """
    if weight.dim() == 2 and x.dim() != 2:
        flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        return product(flat, weight, dtype, bias).view(*x.shape[:-1], len(weight))
    rows, width = x.double(), x.shape[-1]
    bound = None
    if not ({x.dtype, weight.dtype} <= EXACT and width <= MOST_EXACT):
        # Any order has an error of at most K * UNIT * |x| * |w|, the fixed order a smaller one: it has at most
        # K / 256 + 9 dependent additions.
        bound = rows.square().sum(-1, keepdim=True).sqrt_().mul_((1.02 * width + 16) * UNIT)
    out = torch.empty(*x.shape[:-1], weight.shape[-2], dtype=dtype, device=x.device)
    block = max(LEAST_BLOCK_ROWS, BLOCK_ELEMENTS // max(width, 1)) if weight.dim() == 2 else weight.shape[-2]
    memory = weight.new_empty(min(block, weight.shape[-2]) * weight[..., :1, :].numel(), dtype=torch.float64)
    for start in range(0, weight.shape[-2], max(block, 1)):
        channels = slice(start, start + block)
        some = weight[..., channels, :]
        wide = memory[: some.numel()].view(some.shape).copy_(some)
        total = rows @ wide.mT
        own_bias = None if bias is None else bias[channels].double()
        if bound is None:
            out[..., channels] = _finished(total, own_bias, divisor).to(dtype)
        else:
            out[..., channels] = _rounded(
                total, bound * _largest_norm(wide, dtype), rows, wide, dtype, own_bias, divisor
            )
    return out


def _largest_norm(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an upper bound of the row norms of [..., N, K], as [..., 1, 1].

    16-bit results are seldom near a rounding boundary: the norm of all rows together suffices and is faster.
    """
    if dtype.itemsize < 4 and wide.dim() == 2:
        return wide.view(-1).dot(wide.view(-1)).sqrt_()
    return torch.linalg.vector_norm(wide, dim=-1).amax(-1)[..., None, None]


def _finished(total: torch.Tensor, bias: torch.Tensor | None, divisor: torch.Tensor | float) -> torch.Tensor:
    """Return (sum + bias) / divisor, in place. This is monotonic, since divisors are positive."""
    total = total if bias is None else total.add_(bias)
    return total if isinstance(divisor, float) and divisor == 1.0 else total.div_(divisor)


def _rounded(
    total: torch.Tensor,
    bound: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    divisor: torch.Tensor | float,
) -> torch.Tensor:
    """Return the rounded sums in the fixed order; `total` [..., T, N] differs from them by at most `bound`."""
    shifted = total - bound
    low = _finished(shifted, bias, divisor).to(dtype)
    high = _finished(torch.add(total, bound, out=shifted), bias, divisor).to(dtype)
    open_places = low != high  # NaN too
    if not open_places.any():
        return high
    for place in open_places.nonzero().split(max(1, BLOCK_ELEMENTS // x.shape[-1])):
        *outer, row, channel = place.unbind(1)
        sums = total[*outer, row, channel]
        finite = sums.isfinite()  # infinity and NaN do not depend on the order
        if finite.any():
            in_order = sum_in_order(x[*outer, row] * weight[*outer, channel]).squeeze(-1)
            sums = torch.where(finite, in_order, sums)
        own_bias = None if bias is None else bias[channel]
        own_divisor = divisor if isinstance(divisor, float) else divisor[*outer, row, 0]
        high[*outer, row, channel] = _finished(sums, own_bias, own_divisor).to(dtype)
    return high


def sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of [..., K] as [..., 1]: each block of `SUM_BLOCK` columns in halves, then the blocks in order.

    Zeros after the last column do not change the result.
    """
    missing = -values.shape[-1] % SUM_BLOCK
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    total, *others = sum_in_halves(padded.unflatten(-1, (-1, SUM_BLOCK))).unbind(-2)
    for each in others:
        total = total + each
    return total


def sum_in_halves(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of [..., K >= 1] as [..., 1], adding halves elementwise until one column is left."""
    width = values.shape[-1]
    while width > 1:
        half = width // 2
        total = values[..., :half] + values[..., half : 2 * half]
        if width % 2:
            total[..., :1] += values[..., 2 * half :]
        values, width = total, half
    return values


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of [..., K] as [..., 1], in the dtype of the values."""
    return sum_in_halves(values.square()) / values.shape[-1]


def exponential(x: torch.Tensor) -> torch.Tensor:
    """Return e**x in fp64, with the precision of `power_of_two`."""
    return power_of_two(x.double() * LOG2_E)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return 2**x in fp64 with a relative error below 2**-36; x is clamped to +-1000."""
    result = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for values, into in zip(x.reshape(-1).split(EXP_ELEMENTS), result.view(-1).split(EXP_ELEMENTS), strict=True):
        exponent = values.double().clamp(-1000.0, 1000.0)
        nearest = exponent + (1.5 * 2.0**52 + 1023)  # its last bits are the integer next to `exponent`, plus 1023
        power = (nearest.view(torch.int64) << 52).view(torch.float64)
        rest = exponent.sub_(nearest.sub_(1.5 * 2.0**52 + 1023))  # from -0.5 to 0.5
        torch.mul(rest, POWERS[-1], out=into)
        for coefficient in reversed(POWERS[1:-1]):
            into.add_(coefficient).mul_(rest)
        into.add_(POWERS[0]).mul_(power)
    return result


def silu_in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x) in fp32."""
    wide = x.double()
    return (wide / exponential(-wide).add_(1.0)).float()
