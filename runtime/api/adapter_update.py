"""An update of an adapter from a trainer's memory, as one file in the safetensors format.

The adapter's config is JSON in the header's `__metadata__`, under `adapter_config`.
Tensors are torch's, but this file does not import torch: clients use it.
"""

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

from .errors import RequestError

INFLIGHT = ("pin", "switch")
MAX_TENSORS = 1 << 16
PIECE = 1 << 20
THREADS = 8
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # torch's names -> spellings in a header


class AdapterUpdate:
    """An update that can be written.

    tensors   name -> tensor, as get_peft_model_state_dict returns them
    config    the fields of adapter_config.json, or PEFT's LoraConfig
    inflight  pin or switch
    nbytes    size of the file

    Raises RequestError for arguments of another kind. Names, shapes and values are checked when the file is read.
    """

    def __init__(self, tensors: Any, config: Any, inflight: str) -> None:
        if inflight not in INFLIGHT:
            raise RequestError(f"inflight={str(inflight)[:40]!r} must be 'pin' or 'switch'")
        if not isinstance(tensors, Mapping) or not 0 < len(tensors) <= MAX_TENSORS:
            raise RequestError(
                f"tensors must be a dict of 1 to {MAX_TENSORS} tensors, as peft's get_peft_model_state_dict returns it"
            )
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not hasattr(tensor, "data_ptr"):
                raise RequestError(f"tensors: {str(name)[:160]!r} must be a name with a torch tensor")
            if _dtype(tensor) not in _DTYPES:
                raise RequestError(
                    f"tensors: {name[:160]!r} has dtype {_dtype(tensor)}, expected bfloat16, float16 or float32"
                )
        self._tensors: Mapping[str, Any] = tensors
        self._header = _header(tensors, _json(config))
        self.nbytes = len(self._header) + sum(map(_nbytes, tensors.values()))

    def copy(self, target: memoryview) -> None:
        """Copy the update into memory of `nbytes`, on several threads."""
        start, end = ctypes.addressof(ctypes.c_ubyte.from_buffer(target)), len(self._header)
        target[:end] = self._header
        pieces, tensors = [], list(self._data())
        for data in tensors:
            size, source = _nbytes(data), data.data_ptr()
            pieces += [(start + end + at, source + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
            end += size

        def copy(part: int) -> None:
            for piece in pieces[part::THREADS]:
                ctypes.memmove(*piece)  # releases the GIL

        with ThreadPoolExecutor(THREADS, "adapter-update") as pool:
            list(pool.map(copy, range(THREADS)))

    def _data(self) -> Iterator[Any]:
        """Yield the tensors on the CPU without gaps, in the file's order."""
        return (tensor.detach().cpu().contiguous() for tensor in self._tensors.values())


def _header(tensors: Mapping[str, Any], config: str) -> bytes:
    """Return the file's bytes before the tensors' data, which follow in the same order without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "adapter_config": config}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _nbytes(tensor)
        entry = {"dtype": _DTYPES[_dtype(tensor)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def _json(config: Any) -> str:
    """Return a config as JSON. Raises RequestError."""
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise RequestError("config must be a dict of adapter_config.json's fields, or peft's LoraConfig")
    try:
        return json.dumps(dict(fields), default=_plain)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(f"config cannot be written as JSON: {problem}") from None


def _plain(value: Any) -> Any:
    """Return a value of PEFT's config as JSON has it."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"it has a value of type {type(value).__name__}")


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def write_at(handle: int, data: memoryview, offset: int) -> int:
    """Write all bytes at an offset of an open file; return the offset of their end. Raises OSError."""
    while data:
        count = os.pwrite(handle, data, offset)
        data, offset = data[count:], offset + count
    return offset
