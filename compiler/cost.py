"""What a step moves and about how long that takes: bytes of its arguments and results, the bandwidth of the SMs it may use, a launch's cost.

Estimates for dumps, not measurements. Decode steps are bound by bytes, so bytes at the H200's measured read bandwidth are a fair first guess.
"""
from dataclasses import dataclass
from itertools import pairwise

from .buffers import View, views_in
from .program import Program, Step

LAUNCH_SECONDS = 1.2e-6  # a kernel in a chain inside a CUDA graph
LAUNCH_SECONDS_PDL = 0.9e-6
# TB/s that a reading loop reached with so many SMs (one CTA each; 132 with four)
BANDWIDTH = ((0, 0.0), (33, 2.21), (66, 3.65), (99, 4.37), (132, 4.68))

# Arguments of which an op touches a part only: rows by index, pages by block table, slots by adapter
_BY_TOKEN = {"sidestream.embedding": (1,), "aten.embedding.default": (0,), "sidestream.append_kv": (2, 3), "sidestream.rope_append": (4, 5)}
_BY_PAGE = {"sidestream.paged_attention": (1, 2), "sidestream.paged_attention_quant": (1, 2)}
_BY_SLOT = {"sidestream.lora": (1, 2), "sidestream.lora_shrink": (1,), "sidestream.lora_expand": (1,)}


@dataclass(frozen=True)
class Placed:
    """A step on the estimated time axis, in seconds."""

    start: float
    end: float


def step_bytes(program: Program, step: Step) -> int:
    """Bytes that a step reads and writes, each tensor once (of tables, caches and adapter stacks the most that the bucket can touch)."""
    total = sum(_view_bytes(program, view) for view in step.outs)
    seen: set[View] = set()
    arguments = (*enumerate(step.args), *((-1, value) for _, value in step.kwargs))
    for position, value in arguments:
        for view in views_in(value):
            if view not in seen:
                seen.add(view)
                total += int(_view_bytes(program, view) * _share(program, step, position, view))
    return total


def bandwidth(sms: int | None) -> float:
    """Bytes a second that `sms` SMs can read; None = all."""
    if sms is None or sms >= BANDWIDTH[-1][0]:
        return BANDWIDTH[-1][1] * 1e12
    for (low, slow), (high, fast) in pairwise(BANDWIDTH):
        if sms <= high:
            return (slow + (fast - slow) * (sms - low) / (high - low)) * 1e12
    return BANDWIDTH[-1][1] * 1e12


def estimate(program: Program) -> list[Placed]:
    """Start and end of each step: as early as its stream and its waits allow, for launch plus bytes over bandwidth."""
    free = {"main": 0.0, "side": 0.0}
    placed: list[Placed] = []
    for step in program.steps:
        start = max([free[step.stream], *(placed[wait].end for wait in step.waits)])
        end = start + (LAUNCH_SECONDS_PDL if step.pdl else LAUNCH_SECONDS) + step_bytes(program, step) / bandwidth(step.sm_budget)
        placed.append(Placed(start, end))
        free[step.stream] = end
    return placed


def _view_bytes(program: Program, view: View) -> int:
    elements = 1
    for size, stride in zip(view.shape, view.stride, strict=True):
        elements *= size if stride or not size else 1
    return elements * (view.dtype or program.by_name[view.buffer].dtype).itemsize


def _share(program: Program, step: Step, position: int, view: View) -> float:
    tokens = step.outs[0].shape[0] if step.outs and step.outs[0].shape else 1
    rows = max(1, view.shape[0]) if view.shape else 1
    if position in _BY_TOKEN.get(step.op, ()):
        if "embedding" in step.op:
            return min(1.0, tokens / rows)
        page_tokens = view.shape[3] if len(view.shape) > 3 else 1
        return min(1.0, (program.bucket.tokens if program.bucket else tokens) / (rows * page_tokens))
    if position in _BY_PAGE.get(step.op, ()) and program.bucket is not None:
        return min(1.0, program.bucket.sequences * program.bucket.blocks / rows)
    if position in _BY_SLOT.get(step.op, ()):
        return min(1.0, (program.bucket.tokens if program.bucket else rows) / rows)
    return 1.0
