"""Prints the processor and a digest of reference results; the process fails where a result depends on its neighbours.

    python tests/support/numerics.py

The first line holds results of basic IEEE operations only, which are the same on every processor.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sidestream.ops.attention.rope import rope_angles_reference
from sidestream.ops.core.reproducible_sums import exponential, linear, product
from sidestream.ops.elementwise.rms_norm import rms_norm_reference
from sidestream.ops.elementwise.sample import gumbel_noise, top_logprobs
from sidestream.ops.elementwise.silu_mul import silu_mul_reference

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.processor import processor_name

SIZES = (1, 2, 3, 5, 16, 31, 33, 40)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(*shape: int) -> torch.Tensor:
    """Standard normal values that are the same with every release and instruction set."""
    return torch.from_numpy(DRAW.standard_normal(shape, dtype=np.float32))


def checked(name: str, compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The results of all rows; SystemExit where those of fewer rows are others."""
    whole = compute(rows)
    for size in SIZES:
        for start in (0, len(rows) - size):
            if not torch.equal(compute(rows[start : start + size]), whole[start : start + size]):
                raise SystemExit(f"{name}: rows {start} to {start + size} differ alone from {len(rows)}")
    return whole


def portable_results() -> list[torch.Tensor]:
    """Results that are the same on every processor."""
    found = []
    for dtype in DTYPES:
        for outputs, inputs in ((97, 48), (33, 600), (500, 1031)):
            x, weight, bias = drawn(40, inputs).to(dtype), drawn(outputs, inputs).to(dtype), drawn(outputs).to(dtype)
            found.append(checked(f"linear {dtype}", lambda rows, w=weight, b=bias: linear(rows, w, b), x))
        found.append(checked(f"SiLU {dtype}", lambda rows: silu_mul_reference(rows, None), drawn(40, 206).to(dtype)))
        gain = drawn(83).to(dtype)
        found.append(
            checked(f"norm {dtype}", lambda rows, w=gain: rms_norm_reference(rows, w, 1e-5), drawn(40, 83).to(dtype))
        )
    e4m3 = drawn(300, 77).to(torch.float8_e4m3fn)
    found.append(checked("e4m3", lambda rows: product(rows, e4m3, torch.float32), drawn(40, 77).to(e4m3.dtype)))
    found.append(checked("exponential", exponential, drawn(40, 83) * 9))
    return found


def check_local_results() -> None:
    """Results that are the same in every batch of one processor: they call the libraries' elementary functions."""
    frequencies = 10000.0 ** -(torch.arange(17) / 17)
    checked("angles", lambda rows: rope_angles_reference(rows, frequencies)[0][:, 0], torch.arange(40) * 731)
    checked("log-probabilities", lambda rows: top_logprobs(rows, torch.zeros(len(rows)), 3).logprobs, drawn(40, 1037))
    checked("noise", lambda rows: gumbel_noise(rows, rows + 1, 1037), torch.arange(40))


if __name__ == "__main__":
    DRAW = np.random.Generator(np.random.PCG64(11))
    digest = hashlib.sha256()
    for result in portable_results():
        digest.update(result.float().numpy().tobytes())
    check_local_results()
    print(digest.hexdigest())
    print(processor_name())
