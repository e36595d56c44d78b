"""Reading one .safetensors file: headers first, data lazily through a memory map, every fault under the caller's
error class.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .regular_file import LFS_POINTER, is_lfs_pointer

FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class SafetensorsFile:
    """The tensors of one file. Opening reads the header only and proves that the file is as long as the header says."""

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
        """One tensor, a view of the memory map: pages are read when touched. Do not write to it."""
        try:
            return self._handle.get_tensor(name)
        except (OSError, SafetensorError) as problem:
            raise self.error(f"{self.path.name}: tensor {name!r} cannot be read ({problem}): {self.remedy}") from None

    def check_floating(self, name: str) -> None:
        """Raises unless the tensor is bf16, fp16 or fp32."""
        if self.dtypes[name] not in FLOATING:
            raise self.error(
                f"{self.path.name}: tensor {name!r} has dtype {self.dtypes[name]}, expected one of "
                f"{', '.join(FLOATING)}: save it unquantized"
            )
