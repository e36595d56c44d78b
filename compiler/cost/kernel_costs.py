"""Constants of each kind of kernel, and corrections for a step's arguments.

Unless a file of docs/measurements is named, constants are fitted to the changes in bench_ablation_h200.json (8, 32 and
64 sequences), the decode steps of bench_latency_h200.json and the layers of bench_layer_int8_h200.json.
`tests/support/estimated_changes.py` compares the changes with the estimates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

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
from ..program.calls import traits_of
from ..program.program import Program, Step
from .bytes_and_flops import Assumptions, active_groups, itemsize, named_arguments, part_and_world
from .hardware import Gpu

FULL_ROWS = 64  # costs per row grow up to this number of rows of activations


@dataclass(frozen=True)
class Kind:
    """Constants of a kind of kernels, which have about equal speed; each op is registered with its kind.

    latency       seconds beyond the launch of a small instance: dependency wait, first loads, the last CTA's end
    reached       share of the memory's bandwidth in its inner loop; above 1 if rows are still in the L2 cache
    reached_flops share of the tensor cores' rate
    per_rows      additional seconds for 64 and more rows of activations; proportional for fewer
    early         seconds before it waits for its predecessor (barriers, descriptors, first weights): hidden by
                  programmatic dependent launch, else added
    sm_rate       bytes per second of one SM's tensor cores; 0: more than the memory's bandwidth
    """

    latency: float
    reached: float
    reached_flops: float = 0.5
    per_rows: float = 0.0
    early: float = 0.0
    sm_rate: float = 0.0


LINK_REACHED = 0.8  # share of NVLink's bandwidth that the collectives below reach
ROWS_EARLY = 1.43e-6  # `early` of kernels with one program per row
KINDS: dict[str, Kind] = {
    "decoder_block": Kind(11.59e-6, 0.93, per_rows=13.61e-6, early=0.5e-6),
    # FLOPs: about the share with 256 and 512 tokens (tune_h200.txt)
    "linear": Kind(1.27e-6, 1.00, 0.78, per_rows=0.55e-6, early=1.34e-6, sm_rate=67e9),
    "plan": Kind(0.6e-6, 0.5),  # once per step
    "moe_route": Kind(2.4e-6, 0.7, early=ROWS_EARLY),  # not measured: a product, then a choice
    "widen_kv": Kind(1.2e-6, 0.8),
    "lora_shrink": Kind(2.64e-6, 0.58),
    "lora_round": Kind(0.4e-6, 0.58, early=ROWS_EARLY),
    "lora_expand": Kind(2.03e-6, 0.58, early=1.93e-6),
    "attention": Kind(3.34e-6, 0.95, 0.45, early=1.61e-6),  # bytes, FLOPs: bench_attention_h200.txt
    "rope_append": Kind(0.60e-6, 0.5, early=ROWS_EARLY),  # bytes: bench_kernels_h200.txt, 256 tokens
    "silu_mul": Kind(0.00e-6, 1.2, early=ROWS_EARLY),  # bytes: the same
    "rope_angles": Kind(2.4e-6, 0.7, early=ROWS_EARLY),
    "norm": Kind(0.95e-6, 1.2, early=ROWS_EARLY),  # bytes: the same
    # torch's two-shot sums of two H200 inside a CUDA graph: 6.5 us for 16 KiB, 9.9 for 1 MiB, 19.9 for 4 MiB
    "collective": Kind(5.3e-6, 0.7),
    "collective_norm": Kind(6.25e-6, 0.7),  # not measured: latencies of a collective and of a norm
    "rows": Kind(0.22e-6, 0.7, early=ROWS_EARLY),  # all other ops: small, or once per step
    "product": Kind(2.13e-6, 0.89),  # ATen's linears
    "foreign": Kind(0.35e-6, 0.7),  # ATen's other ops
}


class Extra:
    """Seconds that a step's arguments add to the latency of its kind: measured corrections."""

    # a quantizing kernel needs the maximum of a row before it writes the first value
    QUANTIZES: Final = 0.97e-6
    ROTATES: Final = 0.40e-6
    # programs of a linear that share tiles wait for each other's partial sums, which grow with the rows
    SPLITS: Final = 0.37e-6
    SPLITS_ROWS: Final = 1.39e-6
    # a linear with a shape that is in no table runs with an untuned configuration
    UNTUNED: Final = 0.44e-6
    UNTUNED_ROWS: Final = 1.30e-6
    # a share of the SMs divides a table's tiles unevenly: waits for sums are longer, and sums grow with the rows
    UNEVEN_ROWS: Final = 2.97e-6
    # programs of a LoRA kernel that loop over work items; each further round; each plane that they sum
    LOOPS: Final = 0.77e-6
    ROUND: Final = 0.90e-6
    PLANE: Final = 0.07e-6
    # not measured: if every rank reads all rows from all peers, there is one exchange of signals instead of two
    ONE_SHOT: Final = -1.8e-6
    # the kernel for a 16-bit cache starts sooner
    WIDE_CACHE: Final = -1.63e-6
    # a shrink that reads 16-bit rows; for each plane, a shrink that also widens an eight-bit stack
    WIDE_ROWS: Final = 0.77e-6
    WIDENS_PLANE: Final = 0.22e-6


def kind_of(op: str) -> Kind:
    """Return the entry in KINDS of an op's name."""
    return KINDS[traits_of(op).kind]


def takes_whole_sms(program: Program, step: Step, rows: int, gpu: Gpu) -> bool:
    """Return whether a step's kernel needs whole SMs, as cuBLAS's linears and the large kernel do.

    Their CTAs do not fit next to others (docs/measurements/workload_g_h200_trace_lora.json.gz).
    """
    if step.op == "sidestream.linear_8bit_lora":
        return True
    if step.op != "sidestream.linear_8bit" or step.sm_budget is not None:
        return False
    return _config(program, step, rows, gpu).kernel in ("scaled_mm", "large")


def busy_sms(program: Program, step: Step, rows: int, gpu: Gpu) -> float | None:
    """Return the SMs that a step's programs use because of its budget; None: as many as without a budget.

    A budget is a number of programs. A linear with fewer programs is unchanged, and a LoRA kernel loops instead
    (`_rounds`).
    """
    if step.sm_budget is None or step.op != "sidestream.linear_8bit":
        return None
    split, all_sms = (_split(program, step, rows, gpu, sms) for sms in (step.sm_budget, gpu.sms))
    return gpu.sms * split.programs / all_sms.programs


def extra_seconds(program: Program, step: Step, rows: int, gpu: Gpu, assume: Assumptions) -> float:
    """Return the sum of the entries of `Extra` that apply to a step."""
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
    """Return the loop count of a LoRA kernel's programs; 0: the launch has a program for each work item."""
    if step.op == "sidestream.lora_shrink" and step.sm_budget is not None:
        stack = arguments["a"]
        _, ranks, k = stack.shape
        splits = arguments["splits"]
        pieces = splits * cdiv(ranks, shrink.once_block(ranks, shrink.split_width(k, splits))[0])
        programs = shrink.CTAS_PER_SM * step.sm_budget
        if arguments["tiles"].shape[0] * pieces <= programs:
            return 0
    elif step.op == "sidestream.lora_expand" and (step.sm_budget is not None or arguments.get("b_scale") is None):
        stack = arguments["b"]
        _, _, ranks = stack.shape
        slices = arguments["slices"]
        width = itemsize(program, arguments["b"])
        columns, _ = expand.expand_block(ranks, arguments["tile"], max(slices), width)
        pieces = sum(cdiv(part, columns) for part in slices)
        programs = expand.CTAS_PER_SM * (step.sm_budget or gpu.sms)
    else:
        return 0
    active = ceil(active_groups(program, step, stack, assume))
    return cdiv(min(arguments["tiles"].shape[0], active) * pieces, programs)


def _split(program: Program, step: Step, rows: int, gpu: Gpu, sms: int) -> WorkSplit:
    return work_split(_config(program, step, rows, gpu), rows, *_weight(program, step).shape, sms)


def _weight(program: Program, step: Step) -> View:
    weights = (view for view in step.inputs() if program.by_name[view.buffer].kind == "weight")
    return next(view for view in weights if len(view.shape) == 2)


def _is_int8(program: Program, step: Step) -> bool:
    weight = _weight(program, step)
    return (weight.dtype or program.by_name[weight.buffer].dtype) == torch.int8


def _config(program: Program, step: Step, rows: int, gpu: Gpu) -> LinearConfig:
    weight, out, int8 = _weight(program, step), step.outs[0], _is_int8(program, step)
    n, k = weight.shape
    result, operand = (view.dtype or program.by_name[view.buffer].dtype for view in (out, weight))
    return linear_config(rows, n, k, gpu.sms, scaled_mm_takes(n, k, result, operand), int8=int8)


def _tuned(program: Program, step: Step, rows: int) -> bool:
    """Return whether a table of measured configurations has the linear's shape; int8 also uses e4m3's entries."""
    place = (*_weight(program, step).shape, padded_tokens(rows))
    return any(place in tuned_table(table_op("linear_8bit", int8)) for int8 in {False, _is_int8(program, step)})
