"""Buffers (named memory), views (tensors inside them), and their JSON form."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

KINDS = ("input", "weight", "adapter", "temp", "output")
Kind = Literal["input", "weight", "adapter", "temp", "output"]
SHORT_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}


class ProgramError(ValueError):
    """A program is malformed, or does not fit the tensors that it is bound to."""


@dataclass(frozen=True)
class Buffer:
    """Named memory.

    `temp` buffers are in the arena at byte `offset`; other kinds are separate tensors (offset None). `life`: the first
    and last step that access the buffer (-1, -1: none). `stride`: in elements, None = contiguous.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int | None = None
    life: tuple[int, int] = (-1, -1)
    stride: tuple[int, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        return span(self.shape, self.strides) * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return contiguous_strides(self.shape) if self.stride is None else self.stride


@dataclass(frozen=True)
class View:
    """A tensor inside a buffer: shape, strides and offset in elements of `dtype` (None = the buffer's dtype)."""

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    dtype: torch.dtype | None = None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in JSON: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def short_dtype(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `bf16` for `torch.bfloat16`."""
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(name: Any) -> torch.dtype:
    """Return `torch.bfloat16` for `bfloat16`. Raises ProgramError for an unknown name."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ProgramError(f"unknown dtype {name!r}")
    return dtype


def views_in(value: Any) -> Iterator[View]:
    """Yield the views in an argument or nested tuple of arguments."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from views_in(entry)


def describe_view(view: View, buffers: Mapping[str, Buffer]) -> str:
    """Return dtype and shape of a view into `buffers` (by name): `bf16[16, 4096]`."""
    return f"{short_dtype(view.dtype or buffers[view.buffer].dtype)}[{', '.join(map(str, view.shape))}]"


# JSON: views, dtypes and the like are objects with one key; numbers, strings, booleans and None encode
# themselves.


def encode(value: Any) -> Any:
    """Return a step's argument as plain JSON. Raises ProgramError for a type without an encoding."""
    if isinstance(value, View):
        return {
            "view": [
                value.buffer,
                list(value.shape),
                list(value.stride),
                value.offset,
                None if value.dtype is None else dtype_name(value.dtype),
            ]
        }
    if isinstance(value, (tuple, list)):
        return [encode(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "bound"}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ProgramError(f"a program can't hold an argument of type {type(value).__name__}: {value!r}")


def decode(value: Any) -> Any:
    """Return the value that `encode` has encoded. Raises ProgramError for other JSON."""
    if isinstance(value, list):
        return tuple(decode(entry) for entry in value)
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key == "view" and isinstance(content, list) and len(content) == 5:
            buffer, shape, stride, offset, dtype = content
            return View(buffer, tuple(shape), tuple(stride), offset, None if dtype is None else parse_dtype(dtype))
        if key == "dtype":
            return parse_dtype(content)
        if key == "device" and content == "bound":
            return torch.device("meta")
        if key == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        kinds = {"memory_format": torch.memory_format, "layout": torch.layout}
        if key in kinds and isinstance(content, str) and isinstance(getattr(torch, content, None), kinds[key]):
            return getattr(torch, content)
    raise ProgramError(f"unknown value in a program: {value!r}")
