"""Profiler ranges: within `step_ranges()`, each step and each replay is a range with its name.

Ranges are torch's `record_function`, and NVTX ranges on a GPU. They are off by default, at no cost.
`compiler/inspect/profile.py` reads the names.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..program.program import Program, Step

STEP_RANGE = re.compile(r"(?P<program>\S+) step (?P<index>\d+) (?P<op>\S+)")
REPLAY_RANGE = re.compile(r"(?P<program>\S+) replay")


@dataclass
class Recording:
    """The bound programs, by name, that ran while ranges were on."""

    bound: dict[str, Any] = field(default_factory=dict)


class _Switch:
    recording: Recording | None = None


SWITCH = _Switch()


@contextmanager
def step_ranges() -> Iterator[Recording]:
    """Turn the ranges on within the context and yield the recording. Not reentrant."""
    if SWITCH.recording is not None:
        raise RuntimeError("step ranges are on already; leave the outer step_ranges() first")
    SWITCH.recording = Recording()
    try:
        yield SWITCH.recording
    finally:
        SWITCH.recording = None


def step_range(program: Program, step: Step) -> str:
    """Return the range name of a step: `decode_t8_b8_p8_lora step 12 sidestream.rms_norm_quant`."""
    return f"{program.name} step {step.index} {step.op}"


def replay_range(program: Program) -> str:
    """`decode_t8_b8_p8_lora replay`."""
    return f"{program.name} replay"


@contextmanager
def named(name: str) -> Iterator[None]:
    """Open a range named `name` for torch's profiler and for NVTX."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


def ranged(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `call` within a range named `name`."""

    def run() -> None:
        with named(name):
            call()

    return run
