"""One .safetensors file: tensors through a memory map; helpers that read bytes and check their values."""

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .untrusted_files import LFS_POINTER, is_lfs_pointer

FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LARGEST = 1 << 16
"""Bound of magnitudes, about fp16's: trained weights are far smaller, and larger ones overflow in the model."""
_EXPONENT = {
    torch.bfloat16: (np.uint16, np.int16, 0x4780),
    torch.float16: (np.uint16, np.int16, 0x7C00),
    torch.float32: (np.uint32, np.int32, 0x47800000),
}


class SafetensorsFile:
    """The tensors of one file. The constructor reads the header only and checks the file's length against it."""

    def __init__(self, path: Path, error: type[ValueError], remedy: str) -> None:
        self.path = path
        self.error = error
        self.remedy = remedy
        try:
            self._handle = safe_open(str(path), framework="pt", device="cpu")
            self.shapes: dict[str, tuple[int, ...]] = {}
            self.dtypes: dict[str, str] = {}
            for name in self._handle.keys():  # noqa: SIM118  not a dict
                entry = self._handle.get_slice(name)
                self.shapes[name] = tuple(entry.get_shape())
                self.dtypes[name] = str(entry.get_dtype())
        except FileNotFoundError:
            raise error(f"{path.name} is missing from {path.parent}: {remedy}") from None
        except (OSError, SafetensorError, ValueError) as problem:
            if is_lfs_pointer(path):
                raise error(f"{path.name} {LFS_POINTER}") from None
            raise error(f"{path.name} is damaged or truncated ({problem}): {remedy}") from None

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, a view of the memory map: pages are read on first access. Do not write to it."""
        try:
            return self._handle.get_tensor(name)
        except (OSError, SafetensorError) as problem:
            raise self.error(f"{self.path.name}: tensor {name!r} cannot be read ({problem}): {self.remedy}") from None

    def check_floating(self, name: str) -> None:
        """Raise unless the tensor is bf16, fp16 or fp32."""
        if self.dtypes[name] not in FLOATING:
            raise self.error(
                f"{self.path.name}: tensor {name!r} has dtype {self.dtypes[name]}, expected one of "
                f"{', '.join(FLOATING)}: save it unquantized, in one of these"
            )


def read_fully(handle: int, target: NDArray[np.uint8], offset: int) -> None:
    """Fill `target` with a file's bytes at `offset`. Raises EOFError for a shorter file, and OSError."""
    done = 0
    while done < target.size:
        count = os.preadv(handle, [target[done:].data], offset + done)
        if not count:
            raise EOFError("it became shorter while it was read")
        done += count


def in_range(data: NDArray[np.uint8], dtype: torch.dtype) -> bool:
    """Return whether every value of `dtype` in these bytes is finite, with a magnitude below LARGEST.

    The bits of any other value are at least `exponent` as a signed integer or, with the sign bit, at least
    `sign + exponent` as an unsigned one. So two maxima are enough.
    """
    unsigned, signed, exponent = _EXPONENT[dtype]
    sign = 1 << (8 * dtype.itemsize - 1)
    return not data.size or (
        int(data.view(signed).max()) < exponent and int(data.view(unsigned).max()) < sign + exponent
    )
