"""Registers, shared memory and warps of programs' kernels, from machine code compiled ahead of time.

Tensors have the program's strides, and all addresses are assumed to be aligned, as in the arena.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from ...ops.core.registry import Op
from ...ops.core.triton_support import INTERPRETED
from ..program.buffers import View
from ..program.calls import own_op
from ..program.program import Program, Step
from .machine_code import MachineCode, compile_launch, name_launches, target_here

PACKAGE = __name__.partition(".compiler.")[0]
Figures = Mapping[str, int]
Wrap = Callable[[Sequence[Any]], Iterable[Any]]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Resources:
    """Registers and spilled registers per thread, bytes of shared memory per CTA, and warps.

    target    compilation target ("sm_90"); "" if nothing was compiled
    variants  (kernel such as `ops.elementwise.rms_norm._rms_norm_kernel`, its figures) for each specialisation
    launches  program name -> for each step the indices of its variants, in launch order
    refused   op -> error of a launch that could not be compiled

    A step without launches calls another library (such as cuBLAS in `linear_8bit` with many tokens).
    """

    target: str = ""
    variants: Sequence[tuple[str, Figures]] = ()
    launches: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, dict[str, int]]:
        """Kernel -> its figures, each the largest of all variants."""
        found: dict[str, dict[str, int]] = {}
        for name, figures in self.variants:
            entry = found.setdefault(name, {})
            for key, value in figures.items():
                entry[key] = max(entry.get(key, 0), value)
        return dict(sorted(found.items()))


def program_resources(programs: Sequence[Program], wrap: Wrap = iter) -> Resources:
    """Compile the launches of `programs` for this machine's GPU, or for sm_90 without one.

    `wrap` shows progress over the different launches. A launch that can't be compiled is in `refused`. Steps of other
    libraries have no launches.
    """
    if INTERPRETED:
        raise RuntimeError("nothing is compiled while TRITON_INTERPRET=1; unset it to read the kernels' resources")
    keys, first = _different_launches(programs)
    target = target_here()
    variants: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    found: dict[str, list[int]] = {}
    refused: dict[str, str] = {}
    for key in wrap(sorted(first, key=lambda key: (first[key][2].op, key))):
        step = first[key][2]
        try:
            codes = _on_meta(partial(compile_launch, target=target), *first[key])
            own = [variants.setdefault(_figures(code), len(variants)) for code in codes]
        except Exception as error:  # a compiler may raise anything; this launch then has no figures
            refused.setdefault(
                step.op, f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"[:300]
            )
            continue
        found[key] = own
    launches = {
        program.name: [found.get(keys.get((program.name, step.index), ""), []) for step in program.steps]
        for program in programs
    }
    return Resources(f"sm_{target.arch}", [(name, dict(figures)) for name, figures in variants], launches, refused)


def launched_kernels(programs: Sequence[Program]) -> dict[str, list[list[str]]]:
    """Return program name -> for each step the names of its kernels on Hopper, in order, without compiling.

    Names are those of `Resources`. Steps of other libraries, and launches that query a device, have none.
    """
    if INTERPRETED:
        return {program.name: [[] for _ in program.steps] for program in programs}
    keys, first = _different_launches(programs)
    found: dict[str, list[str]] = {}
    for key, launch in first.items():
        with suppress(Exception):  # a launch may query a device and fail; its step then has no names
            found[key] = [name.removeprefix(f"{PACKAGE}.") for name in _on_meta(name_launches, *launch)]
    return {
        program.name: [found.get(keys.get((program.name, step.index), ""), []) for step in program.steps]
        for program in programs
    }


def _different_launches(
    programs: Sequence[Program],
) -> tuple[dict[tuple[str, int], str], dict[str, tuple[Op, Program, Step]]]:
    """Return ((program name, step index) -> key, key -> the first step with it), for Sidestream's ops."""
    keys: dict[tuple[str, int], str] = {}
    first: dict[str, tuple[Op, Program, Step]] = {}
    for program in programs:
        for step in program.steps:
            op = own_op(step.op)
            if op is not None:
                key = keys[program.name, step.index] = _key(program, step)
                first.setdefault(key, (op, program, step))
    return keys, first


def _on_meta(call: Callable[..., list[Found]], op: Op, program: Program, step: Step) -> list[Found]:
    """Apply `call` (compile_launch or name_launches) to a step's launch with meta tensors."""
    args, outs = [_value(program, value) for value in step.args], tuple(_meta(program, view) for view in step.outs)
    # cuBLAS has its own kernels, and does not support meta tensors
    with patch.object(torch, "_scaled_mm", lambda *_, out, **__: out):
        return call(op.launch, *args, out=outs, sm_budget=step.sm_budget, pdl=step.pdl)


def _figures(code: MachineCode) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return a kernel's name and figures.

    Stack words count as spilled registers only if instructions access them, since a frame may be reserved but unused.
    """
    spills = -(-code.local_bytes // 4) if code.local_bytes and code.spills else 0
    figures = (
        ("registers", code.registers),
        ("spills", spills),
        ("shared_bytes", code.shared_bytes),
        ("warps", code.num_warps),
    )
    return code.function.removeprefix(f"{PACKAGE}."), figures


def _key(program: Program, step: Step) -> str:
    """Return a key that is equal for launches with the same machine code."""
    parts = [_described(program, value) for value in (*step.args, *step.outs)]
    return f"{step.op}({', '.join(parts)}) {step.sm_budget} {step.pdl}"


def _described(program: Program, value: Any) -> str:
    if isinstance(value, View):
        return f"{value.dtype or program.by_name[value.buffer].dtype}{list(value.shape)}/{list(value.stride)}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_described(program, entry) for entry in value)}]"
    return repr(value)


def _value(program: Program, value: Any) -> Any:
    if isinstance(value, View):
        return _meta(program, value)
    return [_value(program, entry) for entry in value] if isinstance(value, tuple) else value


def _meta(program: Program, view: View) -> torch.Tensor:
    dtype = view.dtype or program.by_name[view.buffer].dtype
    return torch.empty_strided(view.shape, view.stride, dtype=dtype, device="meta")
