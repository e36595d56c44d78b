"""What a step's launch is like beyond its kind: whether it takes whole SMs, and what its arguments add to it."""

from collections.abc import Mapping
from typing import Any

import torch

from ...ops.collectives.exchange import is_one_shot
from ...ops.core.triton_support import cdiv
from ...ops.linear.kernel_selection import (
    LinearConfig,
    WorkSplit,
    linear_config,
    padded_tokens,
    table_op,
    tuned_table,
    work_split,
)
from ...ops.linear.scaled_mm import scaled_mm_takes
from ...ops.lora import expand, shrink
from ..program.buffers import View
from ..program.program import Program, Step
from .hardware import Gpu
from .kinds import FULL_ROWS, Extra
from .work import Assumptions, itemsize, named_arguments, part_and_world


def takes_whole_sms(program: Program, step: Step, rows: int, gpu: Gpu) -> bool:
    """Whether a linear is cuBLAS's or the large kernel's, which find no room while smaller CTAs lie on the SMs.

    See docs/measurements/workload_g_h200_trace_lora.json.gz.
    """
    if step.op == "sidestream.linear_8bit_lora":
        return True
    if step.op != "sidestream.linear_8bit" or step.sm_budget is not None:
        return False
    return _config(program, step, rows, gpu).kernel in ("scaled_mm", "large")


def busy_sms(program: Program, step: Step, rows: int, gpu: Gpu) -> float | None:
    """The SMs that a step's programs keep busy under its budget; None: as many as without one.

    A budget is a number of programs. It takes nothing from a linear that has fewer, and a LoRA kernel's programs go
    round once more (`_rounds`).
    """
    if step.sm_budget is None or step.op != "sidestream.linear_8bit":
        return None
    split, all_sms = (_split(program, step, rows, gpu, sms) for sms in (step.sm_budget, gpu.sms))
    return gpu.sms * split.programs / all_sms.programs


def extra_seconds(program: Program, step: Step, rows: int, gpu: Gpu, assume: Assumptions) -> float:
    """What a step's arguments add to the latency of its kind: the entries of `Extra` that apply."""
    share, arguments, seconds = min(rows, FULL_ROWS) / FULL_ROWS, dict(named_arguments(step)), 0.0
    if step.op.endswith("_quant"):
        seconds += Extra.QUANTIZES
    if arguments.get("rotate"):
        seconds += Extra.ROTATES
    if step.op == "sidestream.linear_8bit":
        config, split = _config(program, step, rows, gpu), _split(program, step, rows, gpu, step.sm_budget or gpu.sms)
        if config.kernel not in ("scaled_mm", "large", "wide") and split.split:
            seconds += Extra.SPLITS + Extra.SPLITS_ROWS * share
            tiles = cdiv(_weight(program, step).shape[0], config.block_n) * cdiv(rows, config.block_t)
            if split.programs % tiles and _tuned(program, step, rows):
                seconds += Extra.UNEVEN_ROWS * share
        if not _tuned(program, step, rows):
            seconds += Extra.UNTUNED + Extra.UNTUNED_ROWS * share
    if "partial" in arguments and is_one_shot(*part_and_world(program, step)):
        seconds += Extra.ONE_SHOT
    rounds = _rounds(program, step, arguments, gpu, assume)
    if rounds:
        planes = arguments["planes"].shape[0] if "planes" in arguments else 0
        seconds += Extra.LOOPS + (Extra.ROUND + Extra.PLANE * planes) * (rounds - 1)
    cache, x, a = (arguments.get(name) for name in ("kv_cache", "x", "a"))
    if "block_table" in arguments and isinstance(cache, View) and itemsize(program, cache) > 1:
        seconds += Extra.WIDE_CACHE
    if step.op == "sidestream.lora_shrink" and isinstance(x, View) and isinstance(a, View) and itemsize(program, x) > 1:
        seconds += Extra.WIDE_ROWS
        if itemsize(program, a) == 1:
            seconds += Extra.WIDENS_PLANE * arguments["splits"]
    return seconds


def _rounds(program: Program, step: Step, arguments: Mapping[str, Any], gpu: Gpu, assume: Assumptions) -> int:
    """How many pieces of work a program of a LoRA kernel does one after the other; 0: the launch has a program for each
    piece.
    """
    if step.op == "sidestream.lora_shrink" and step.sm_budget is not None:
        slots, ranks, k = arguments["a"].shape
        splits = arguments["splits"]
        pieces = splits * cdiv(ranks, shrink.once_block(ranks, shrink.split_width(k, splits))[0])
        programs = shrink.CTAS_PER_SM * step.sm_budget
        if arguments["tiles"].shape[0] * pieces <= programs:
            return 0
    elif step.op == "sidestream.lora_expand" and (step.sm_budget is not None or arguments.get("b_scale") is None):
        slots, _, ranks = arguments["b"].shape
        slices = arguments["slices"]
        width = itemsize(program, arguments["b"])
        columns, _ = expand.expand_block(ranks, arguments["tile"], max(slices), width)
        pieces = sum(cdiv(part, columns) for part in slices)
        programs = expand.CTAS_PER_SM * (step.sm_budget or gpu.sms)
    else:
        return 0
    return cdiv(min(arguments["tiles"].shape[0], assume.adapters_of(program, slots)) * pieces, programs)


def _split(program: Program, step: Step, rows: int, gpu: Gpu, sms: int) -> WorkSplit:
    return work_split(_config(program, step, rows, gpu), rows, *_weight(program, step).shape, sms)


def _weight(program: Program, step: Step) -> View:
    return next(
        view for view in step.inputs() if program.by_name[view.buffer].kind == "weight" and len(view.shape) == 2
    )


def _is_int8(program: Program, step: Step) -> bool:
    weight = _weight(program, step)
    return (weight.dtype or program.by_name[weight.buffer].dtype) == torch.int8


def _config(program: Program, step: Step, rows: int, gpu: Gpu) -> LinearConfig:
    weight, out, int8 = _weight(program, step), step.outs[0], _is_int8(program, step)
    n, k = weight.shape
    result, operand = (view.dtype or program.by_name[view.buffer].dtype for view in (out, weight))
    return linear_config(rows, n, k, gpu.sms, scaled_mm_takes(n, k, result, operand), int8=int8)


def _tuned(program: Program, step: Step, rows: int) -> bool:
    """Whether a table of measured configurations has the linear's shape (int8 takes e4m3's where it has none)."""
    place = (*_weight(program, step).shape, padded_tokens(rows))
    return any(place in tuned_table(table_op("linear_8bit", int8)) for int8 in {False, _is_int8(program, step)})
