"""Calls of the CUDA driver that torch does not offer, by ctypes."""

import contextlib
import ctypes
from collections.abc import Generator
from functools import cache
from typing import Any

import torch


@cache
def cuda_driver() -> Any:
    """Return the CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def call_driver(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises RuntimeError for an error code."""
    check_code(name, getattr(driver, name)(*arguments))


def check_code(name: str, code: int) -> None:
    """Raise RuntimeError unless the code that the driver's function `name` returned is 0."""
    if code:
        raise RuntimeError(f"the CUDA driver's {name} failed with error {code}")


@contextlib.contextmanager
def device_context(device: torch.device) -> Generator[None]:
    """Make a device's context current for the driver's calls of this thread. Waits for the device."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield
