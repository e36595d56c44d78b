"""Bytes of a step, and its FLOPs by the width of their operands, from its shapes.

Of large tables only the accessed part counts: embedding rows by token, KV pages by context, adapter stacks by active
adapters, experts by routed tokens. A bucket does not determine contexts, active adapters and routes: see `Assumptions`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

from ...ops.collectives.exchange import bytes_from_peers, is_one_shot
from ...ops.collectives.tensor_parallel_group import world_of
from ...ops.core.kv_layout import PAGE_SIZE
from ..program.buffers import View, views_in
from ..program.calls import overload_of, traits_of
from ..program.program import Program, Step

PAGE_AXIS = 3  # axis of a page's tokens in [pages, kv heads, 2, tokens, ...]


@dataclass(frozen=True)
class Assumptions:
    """Properties that determine a step's cost, in addition to its shapes.

    context   cached tokens of each sequence, this step's included; None: half of the tokens that the block table
              addresses, but at least the step's own tokens
    adapters  number of different adapters in the batch; None: the minimum of slots and sequences
    routing   "uniform": each token chooses among all experts at random; "same": all tokens choose the same ones
    """

    context: int | None = None
    adapters: int | None = None
    routing: Literal["uniform", "same"] = "uniform"

    def context_of(self, program: Program) -> int:
        """Return the cached tokens of each sequence in `program`; 0 if unknown."""
        bucket = program.bucket
        if bucket is None:
            table = program.by_name.get("block_table")
            reach = 0 if table is None else PAGE_SIZE * table.shape[1]
            return reach if self.context is None else min(self.context, reach)
        reach, own = PAGE_SIZE * bucket.blocks, -(-bucket.tokens // bucket.sequences)
        return min(reach, max(own, reach // 2 if self.context is None else self.context))

    def adapters_of(self, program: Program, slots: int) -> int:
        """Return the number of active adapters, with `slots` adapter slots."""
        if program.bucket is None:
            return slots if self.adapters is None else min(slots, self.adapters)
        most = min(slots, program.bucket.sequences)
        return most if self.adapters is None else min(most, self.adapters)

    def experts_of(self, experts: int, top_k: int, tokens: float) -> float:
        """Return the expected number of different experts of `tokens` tokens that have `top_k` of `experts` each."""
        return top_k if self.routing == "same" else experts * (1 - (1 - top_k / experts) ** tokens)


DEFAULT = Assumptions()


@dataclass(frozen=True)
class Work:
    """The work of a step.

    bytes       bytes read and written
    flops       bytes of an operand's element (1: 8-bit, 2: 16-bit, 4: fp32) -> FLOPs, two per multiply-add
    link_bytes  bytes read from other GPUs
    """

    bytes: int
    flops: Mapping[int, float]
    link_bytes: int = 0

    @property
    def total_flops(self) -> float:
        """FLOPs of all widths."""
        return sum(self.flops.values())


def work(program: Program, step: Step, assume: Assumptions = DEFAULT) -> Work:
    """Return bytes and FLOPs of a step; each tensor counts once, since repeated reads hit the cache."""
    return Work(step_bytes(program, step, assume), _flops(program, step, assume), link_bytes(program, step))


def step_bytes(program: Program, step: Step, assume: Assumptions = DEFAULT) -> int:
    """Return the bytes that a step reads and writes: each tensor once, but only used parts of tables and caches."""
    total = sum(int(_view_bytes(program, view) * _written(program, step, view, assume)) for view in step.outs)
    return total + sum(moved for _, moved in argument_bytes(program, step, assume))


def link_bytes(program: Program, step: Step) -> int:
    """Return the bytes that a collective reads from the other ranks' GPUs; 0 for other steps."""
    if traits_of(step.op).family != "collective":
        return 0
    arguments = dict(named_arguments(step))
    nbytes, world = part_and_world(program, step)
    if "partial" not in arguments:  # an all-gather reads the parts of all other ranks
        return (world - 1) * nbytes
    eight_bits = arguments.get("spread") and not arguments.get("keep")
    gathered = nbytes // itemsize(program, arguments["partial"]) if eight_bits else nbytes
    return bytes_from_peers(nbytes, gathered, world, is_one_shot(nbytes, world))


def part_and_world(program: Program, step: Step) -> tuple[int, int]:
    """Return (bytes of a rank's operand of a collective, number of ranks)."""
    return _view_bytes(program, next(step.inputs())), world_of(dict(named_arguments(step))["group"])


def argument_bytes(program: Program, step: Step, assume: Assumptions = DEFAULT) -> Iterator[tuple[View, int]]:
    """Yield each tensor that a step reads or changes in place, with the number of bytes moved."""
    seen: set[View] = set()
    for name, value in named_arguments(step):
        for view in views_in(value):
            if view not in seen:
                seen.add(view)
                yield view, int(_view_bytes(program, view) * _touched(program, step, name, view, assume))


def must_read(program: Program, step: Step, assume: Assumptions = DEFAULT) -> Iterator[tuple[str, int]]:
    """Yield (buffer, bytes) of weights, adapter stacks and KV cache: no fusion makes these reads unnecessary."""
    for view, moved in argument_bytes(program, step, assume):
        if program.by_name[view.buffer].kind in ("weight", "adapter") or _is_cache(view):
            yield view.buffer, moved


def named_arguments(step: Step) -> list[tuple[str, Any]]:
    """Return a step's arguments with their names in the op's schema ("" for arguments that it does not name)."""
    names = _argument_names(step.op)
    return [*zip((*names, *("" for _ in step.args[len(names) :])), step.args, strict=False), *step.kwargs]


@cache
def _argument_names(op: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in overload_of(op)._schema.arguments)


def windows_of(program: Program) -> dict[int, int]:
    """Return attention window -> number of the program's steps with this window."""
    found = Counter(dict(named_arguments(step)).get("window", 0) for step in program.steps)
    return {window: count for window, count in sorted(found.items()) if window}


def _view_bytes(program: Program, view: View) -> int:
    """Return the bytes of the elements; elements repeated by a stride of 0 count once."""
    elements = 1
    for size, stride in zip(view.shape, view.stride, strict=True):
        elements *= size if stride or not size else 1
    return elements * itemsize(program, view)


def itemsize(program: Program, view: View) -> int:
    """Return the bytes of an element of the view."""
    return (view.dtype or program.by_name[view.buffer].dtype).itemsize


def _is_cache(view: View) -> bool:
    return view.buffer.startswith(("kv_cache", "kv_scale"))


def _written(program: Program, step: Step, view: View, assume: Assumptions) -> float:
    """Return the part of a result that the step writes."""
    return _widened(program, step, assume) / _wide_tokens(view) if traits_of(step.op).kind == "widen_kv" else 1.0


def _wide_tokens(view: View) -> int:
    """Return the number of tokens in a result of widen_kv."""
    return max(1, view.shape[0] * view.shape[PAGE_AXIS])


def _widened(program: Program, step: Step, assume: Assumptions) -> int:
    """Return the cached tokens that widen_kv converts (all that fit), for a step that writes or reads its result."""
    wide = step.outs[0] if traits_of(step.op).kind == "widen_kv" else dict(named_arguments(step)).get("wide")
    if not isinstance(wide, View):
        return 0
    return min(_wide_tokens(wide), _sequences(program, step) * assume.context_of(program))


def _touched(program: Program, step: Step, name: str, view: View, assume: Assumptions) -> float:
    """Return the part of a tensor that the step accesses."""
    names = _argument_names(step.op)
    rows = max(1, view.shape[0]) if view.shape else 1
    if name in ("weight", "weight_scale") and is_grouped(step):
        return assume.experts_of(rows, *_routed(program, step)) / rows
    if name and name == traits_of(step.op).gathers:
        return min(1.0, prod(step.outs[0].shape[:-1]) / rows)
    if name == "wide":
        return _widened(program, step, assume) / _wide_tokens(view)
    if name.startswith("kv_") and len(view.shape) > PAGE_AXIS:
        slots = rows * view.shape[PAGE_AXIS]
        if "pages" in names:
            return min(1.0, _widened(program, step, assume) / slots)
        if "block_table" in names:
            if "context_lens" not in names:
                return 0.0  # prefix_attention: no shared pages are assumed
            read = _sequences(program, step) * _read_context(program, step, assume)
            return min(1.0, (read - _widened(program, step, assume)) / slots)
        return min(1.0, _tokens(program, step) / slots)
    if name == "lora_a":  # of the embedding: a row of ranks for each token
        return min(1.0, step.outs[0].shape[0] / (rows * view.shape[1]))
    if program.by_name[view.buffer].kind == "adapter" and len(view.shape) > 1:
        return active_groups(program, step, view, assume) / rows
    return 1.0


def is_grouped(step: Step) -> bool:
    """Return whether a step computes a linear of experts."""
    return traits_of(step.op).family == "moe" and traits_of(step.op).gathers == "weight"


def active_groups(program: Program, step: Step, view: View, assume: Assumptions) -> float:
    """Return the number of adapters, or of adapters' experts, of a stack that a LoRA step reads."""
    slots, experts = _slots_and_experts(program, view)
    active = assume.adapters_of(program, slots)
    if not experts or not active:
        return active
    top_k, tokens = _routed(program, step)
    return active * assume.experts_of(experts, top_k, tokens / active)


def _slots_and_experts(program: Program, view: View) -> tuple[int, int]:
    """Return the slots of a stack, and its experts if the view has a group for each expert of a slot; else 0."""
    slots, *sizes = program.by_name[view.buffer].shape
    return (slots, sizes[0]) if sizes and view.shape[0] == slots * sizes[0] > slots else (view.shape[0], 0)


def _routed(program: Program, step: Step) -> tuple[int, float]:
    """Return (experts of a token, tokens) of a step that has a row for each pair of a token and an expert."""
    top_k = next((each.outs[0].shape[1] for each in program.steps if each.op == "sidestream.moe_route"), 1)
    return top_k, step.outs[0].shape[-2] / top_k


def _read_context(program: Program, step: Step, assume: Assumptions) -> float:
    """Return the cached tokens per sequence that attention reads: all, or those in the windows of its queries."""
    context, arguments = assume.context_of(program), dict(named_arguments(step))
    if not arguments.get("window"):
        return context
    return min(context, arguments["window"] + arguments["q"].shape[0] / _sequences(program, step) - 1)


def _tokens(program: Program, step: Step) -> int:
    if program.bucket is not None:
        return program.bucket.tokens
    mapping = dict(named_arguments(step)).get("slot_mapping")
    return mapping.shape[0] if isinstance(mapping, View) else 1


def _sequences(program: Program, step: Step) -> int:
    if program.bucket is not None:
        return program.bucket.sequences
    lens = dict(named_arguments(step)).get("context_lens")
    return lens.shape[0] if isinstance(lens, View) else 1


def _flops(program: Program, step: Step, assume: Assumptions) -> dict[int, float]:
    """Return the FLOPs of a step's matrix products by width, two per multiply-add.

    Element-wise arithmetic does not count, since its bytes take longer.
    """
    arguments = dict(named_arguments(step))
    if "block_table" in arguments:
        return _attention_flops(program, step, arguments, assume)
    if is_grouped(step):
        weight = arguments["weight"]
        return {itemsize(program, weight): 2.0 * step.outs[0].shape[0] * prod(weight.shape[1:])}
    if traits_of(step.op).gathers:
        return {}
    counted: dict[int, float] = {}
    rows = prod(step.outs[0].shape[:-1]) if step.outs else 0
    for view in step.inputs():
        kind, width = program.by_name[view.buffer].kind, itemsize(program, view)
        if kind == "weight" and len(view.shape) == 2 and min(view.shape) > 1:
            counted[width] = counted.get(width, 0.0) + 2.0 * rows * prod(view.shape)
        elif kind == "adapter" and len(view.shape) == 3:
            tokens = program.bucket.tokens if program.bucket is not None else rows
            if _slots_and_experts(program, view)[1]:
                tokens = step.outs[0].shape[-2]
            read = arguments.get("x")
            narrow = "rank_step" in arguments or (read is not None and itemsize(program, read) == 1)
            width = width if narrow else max(2, width)  # an eight-bit stack is widened for 16-bit activations
            counted[width] = counted.get(width, 0.0) + 2.0 * tokens * prod(view.shape[1:])
    return counted


def _attention_flops(
    program: Program, step: Step, arguments: Mapping[str, Any], assume: Assumptions
) -> dict[int, float]:
    """Return the FLOPs of scores and of their product with V; in prefill a query reads half of the step's tokens."""
    query = arguments.get("q")
    if not isinstance(query, View) or "context_lens" not in arguments:
        return {}
    tokens, channels = _tokens(program, step) if program.bucket is not None else query.shape[0], prod(query.shape[1:])
    own = tokens / _sequences(program, step)
    seen = max(1.0, assume.context_of(program) - (own - 1) / 2)
    seen = min(seen, arguments.get("window") or seen)
    scores_width = 1 if arguments.get("quantize_q") else 2
    each = 2.0 * tokens * seen * channels
    return {1: each, 2: each} if scores_width == 1 else {2: 2 * each}
