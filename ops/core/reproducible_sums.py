"""Products, sums and exponentials whose bits do not depend on their place in a batch, for references on a CPU.

A library's GEMM picks its kernel, and with it the order of its sums, by the number of rows, the number of threads and
the processor. Here every result is what one fixed order gives (`sum_in_order`, in fp64), rounded to the result's dtype.
The GEMM still does the work: in fp64 its error has a bound, and where all values within that bound round to the same
result, the order does not matter (the rounding test of Ziv, "Fast evaluation of elementary mathematical functions with
correctly rounded last bit", 1991). The few other elements are summed again in the fixed order.

Elementwise functions are made of additions, multiplications, divisions and roundings, which IEEE 754 defines to the
bit. `torch.sigmoid` and `torch.nn.functional.silu` compute the last elements of a tensor by other code than the rest.
"""

import math

import torch

UNIT = 2.0**-53  # an fp64 operation is off by at most this, relative to its result
# products of these dtypes, and the sums of 2**17 of them, have at most 53 bits: fp64 sums them exactly in any order
EXACT = frozenset({torch.float8_e4m3fn, torch.int8})
MOST_EXACT = 1 << 17
SUM_BLOCK = 256
BLOCK_ELEMENTS = 1 << 18  # in fp64 at a time, of a weight or of products: 2 MiB
LEAST_BLOCK_ROWS = 64
EXP_ELEMENTS = 1 << 15
LOG2_E = math.log2(math.e)
POWERS = [math.log(2.0) ** order / math.factorial(order) for order in range(10)]  # Taylor series of 2**x


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`: x [..., K], weight [N, K], bias [N] -> [..., N] in x's dtype, rounded once."""
    return product(x, weight, x.dtype, bias)


def mm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`torch.mm`: x [T, K], other [K, N] -> [T, N] in x's dtype, rounded once."""
    return product(x, other.T, x.dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    divisor: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """(x [..., T, K] @ weight [..., N, K]^T + bias [N]) / divisor -> [..., T, N] in `dtype`. The divisor is positive,
    a number or [..., T, 1].

    Operands are fp64, fp32, 16-bit, e4m3 or int8, and have the same leading dimensions, or the weight has none. Then
    not much more than `BLOCK_ELEMENTS` of it are in fp64 at a time. NaN and infinity stay in their rows and columns.
    """
    if weight.dim() == 2 and x.dim() != 2:
        flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        return product(flat, weight, dtype, bias).view(*x.shape[:-1], len(weight))
    rows, width = x.double(), x.shape[-1]
    bound = None
    if not ({x.dtype, weight.dtype} <= EXACT and width <= MOST_EXACT):
        # any order is off by at most K * UNIT * |x| * |w|, the fixed one by less: it adds K / 256 + 9 times in a row
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
    """At least the norm of every row of [..., N, K], as [..., 1, 1]. Results of 16 bits are seldom near a boundary: the
    norm of all rows together does for them, and takes less time.
    """
    if dtype.itemsize < 4 and wide.dim() == 2:
        return wide.view(-1).dot(wide.view(-1)).sqrt_()
    return torch.linalg.vector_norm(wide, dim=-1).amax(-1)[..., None, None]


def _finished(total: torch.Tensor, bias: torch.Tensor | None, divisor: torch.Tensor | float) -> torch.Tensor:
    """A sum as it is rounded, in place; never less for a larger one, since divisors are positive."""
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
    """What the sums in the fixed order are rounded to, of which `total` [..., T, N] is off by at most `bound`."""
    shifted = total - bound
    low = _finished(shifted, bias, divisor).to(dtype)
    high = _finished(torch.add(total, bound, out=shifted), bias, divisor).to(dtype)
    open_places = low != high  # NaN too
    if not open_places.any():
        return high
    for place in open_places.nonzero().split(max(1, BLOCK_ELEMENTS // x.shape[-1])):
        *outer, row, channel = place.unbind(1)
        sums = total[*outer, row, channel]
        finite = sums.isfinite()  # infinity and NaN come out of every order
        if finite.any():
            in_order = sum_in_order(x[*outer, row] * weight[*outer, channel]).squeeze(-1)
            sums = torch.where(finite, in_order, sums)
        own_bias = None if bias is None else bias[channel]
        own_divisor = divisor if isinstance(divisor, float) else divisor[*outer, row, 0]
        high[*outer, row, channel] = _finished(sums, own_bias, own_divisor).to(dtype)
    return high


def sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the sum of [..., K], of each `SUM_BLOCK` columns in halves, then of these sums from the first to the
    last. Zeros after the last column do not change it.
    """
    missing = -values.shape[-1] % SUM_BLOCK
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    total, *others = sum_in_halves(padded.unflatten(-1, (-1, SUM_BLOCK))).unbind(-2)
    for each in others:
        total = total + each
    return total


def sum_in_halves(values: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the sum of [..., K], halves added elementwise until one column is left; K is at least 1."""
    width = values.shape[-1]
    while width > 1:
        half = width // 2
        total = values[..., :half] + values[..., half : 2 * half]
        if width % 2:
            total[..., :1] += values[..., 2 * half :]
        values, width = total, half
    return values


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the mean of the squares of [..., K], in the dtype of the values."""
    return sum_in_halves(values.square()) / values.shape[-1]


def exponential(x: torch.Tensor) -> torch.Tensor:
    """e**x in fp64, as `power_of_two` has it."""
    return power_of_two(x.double() * LOG2_E)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2**x in fp64, with a relative error below 2**-36; of what is below -1000 or above 1000 that of the limit."""
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
    """x * sigmoid(x) in fp32."""
    wide = x.double()
    return (wide / exponential(-wide).add_(1.0)).float()
