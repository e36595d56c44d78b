"""What a step's launch is like beyond its kind: whether it takes whole SMs, and what its arguments add to it."""

import torch

from ...ops.linear.scaled_mm import scaled_mm_takes
from ...ops.linear.tuning import LinearConfig, linear_config, padded_tokens, table_op, tuned_table, work_split
from ..program.buffers import View
from ..program.program import Program, Step
from .hardware import Gpu
from .kinds import FULL_ROWS, Extra
from .work import itemsize, named_arguments


def takes_whole_sms(program: Program, step: Step, rows: int, gpu: Gpu) -> bool:
    """Whether a linear is cuBLAS's or the large kernel's, which find no room while smaller CTAs lie on the SMs.

    See docs/measurements/workload_g_h200_trace_lora.json.gz.
    """
    if step.op == "sidestream.linear_8bit_lora":
        return True
    if step.op != "sidestream.linear_8bit" or step.sm_budget is not None:
        return False
    return _config(program, step, rows, gpu).kernel in ("scaled_mm", "large")


def extra_seconds(program: Program, step: Step, rows: int, gpu: Gpu) -> float:
    """What a step's arguments add to the latency of its kind: the entries of `Extra` that apply."""
    share, arguments, seconds = min(rows, FULL_ROWS) / FULL_ROWS, dict(named_arguments(step)), 0.0
    if step.op.endswith("_quant"):
        seconds += Extra.QUANTIZES
    if arguments.get("rotate"):
        seconds += Extra.ROTATES
    if step.op == "sidestream.linear_8bit":
        config, (n, k) = _config(program, step, rows, gpu), _weight(program, step).shape
        by_tiles = config.kernel not in ("scaled_mm", "large", "wide")
        if by_tiles and work_split(config, rows, n, k, step.sm_budget or gpu.sms).split:
            seconds += Extra.SPLITS + Extra.SPLITS_ROWS * share
        if not _tuned(program, step, rows):
            seconds += Extra.UNTUNED + Extra.UNTUNED_ROWS * share
    cache, x, a = (arguments.get(name) for name in ("kv_cache", "x", "a"))
    if "block_table" in arguments and isinstance(cache, View) and itemsize(program, cache) > 1:
        seconds += Extra.WIDE_CACHE
    if step.op == "sidestream.lora_shrink" and isinstance(x, View) and isinstance(a, View) and itemsize(program, x) > 1:
        tokens = min(x.shape[0], FULL_ROWS) / FULL_ROWS  # its results are planes of them
        seconds += Extra.WIDE_ROWS
        if itemsize(program, a) == 1:
            seconds += Extra.WIDENS_STACK + (Extra.WIDENS_STACK_FULL - Extra.WIDENS_STACK) * tokens
    return seconds


def _weight(program: Program, step: Step) -> View:
    return next(
        view for view in step.inputs() if program.by_name[view.buffer].kind == "weight" and len(view.shape) == 2
    )


def _is_int8(program: Program, step: Step) -> bool:
    weight = _weight(program, step)
    return (weight.dtype or program.by_name[weight.buffer].dtype) == torch.int8


def _config(program: Program, step: Step, rows: int, gpu: Gpu) -> LinearConfig:
    (n, k), out = _weight(program, step).shape, step.outs[0]
    takes = scaled_mm_takes(n, k, out.dtype or program.by_name[out.buffer].dtype)
    return linear_config(rows, n, k, gpu.sms, takes, int8=_is_int8(program, step))


def _tuned(program: Program, step: Step, rows: int) -> bool:
    """Whether a table of measured configurations has the linear's shape (int8 takes e4m3's where it has none)."""
    place = (*_weight(program, step).shape, padded_tokens(rows))
    return any(place in tuned_table(table_op("linear_8bit", int8)) for int8 in {False, _is_int8(program, step)})
