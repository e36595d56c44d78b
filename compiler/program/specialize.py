"""Specialize a symbolic graph to one bucket: static shapes, folded integers, decode flags; without LoRA if unused.

Only the graph is copied, and shapes are propagated with meta tensors, so dozens of buckets take one or two seconds.
`lower` recognizes views by their shared storage.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...ops.core.registry import NAMESPACE, OPS
from ...ops.lora.plan import lora_splits, lora_tile
from ...ops.moe.expert_lora import pair_tile
from ...ops.moe.grouped_linear import expert_tile
from ...ops.moe.plan import group_plan
from ..graph.nodes import (
    CASTS,
    VIEWS,
    aten,
    bind,
    group_plan_of,
    has_operand,
    is_call,
    op_name,
    picks_of,
    set_operands,
    shape_of,
    through_views,
)
from .buffers import contiguous_strides
from .program import Bucket
from .sizes import Spec, SpecializeError, bucket_inputs, placeholders

META = torch.device("meta")
DECODE_TOKENS, PROMPT_TOKENS = 16, 2048  # exact programs of decode steps, and others, have LoRA's launches for these
LORA_OPS = frozenset({"lora", "lora_plan", "lora_shrink", "lora_expand", "expert_lora", "expert_groups"})
PART_OPS = {"lora_adjust": "y"}  # ops of adapters' parts besides LoRA -> the operand that they return changed
SUMS = frozenset({aten.add.Tensor, aten.add_.Tensor, operator.add})
# ops with a zero result for a zero delta, and the plan of LoRA's pairs
ZERO_PRESERVING = (
    VIEWS
    | CASTS
    | {aten.mul.Tensor, aten.clone.default, aten.contiguous.default, aten.cat.default, operator.getitem}
    | {group_plan.overload}
)


def specialize(
    graph_module: fx.GraphModule,
    sizes: Bucket | Mapping[str, Spec],
    *,
    size_independent: bool = False,
    exact: bool = False,
) -> fx.Graph:
    """Return a copy of the graph with static shapes in `meta["val"]` (meta tensors) and without unused inputs.

    `sizes`: a bucket, or placeholder name -> (shape, dtype), example tensor or integer. A bucket of decode steps sets
    attention's decode flag and removes the identity selection of logits rows, as one of steps with drafts does. A
    bucket without `lora` removes LoRA ops and those of adapters' parts, one without `parts` the latter.
    `size_independent`: in every bucket LoRA's shrinks compute one plane and queries are not quantized. `exact`: set the
    flag of this name where an op has it, and give LoRA the same planes and tiles in all programs of decode steps, and
    in all others. Raises SpecializeError with the node that can't be static.
    """
    bucket = sizes if isinstance(sizes, Bucket) else None
    specs = bucket_inputs(graph_module, sizes) if isinstance(sizes, Bucket) else dict(sizes)
    decode = bucket is not None and bucket.decode
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    if bucket is not None and not (bucket.lora and bucket.parts):
        erase_parts(graph)
    if bucket is not None and not bucket.lora:
        erase_lora(graph)
    if decode:
        mark(graph, "decode", True)
    if decode or (bucket is not None and bucket.verifies):
        take_every_row(graph)
    if size_independent or (bucket is not None and bucket.verifies):
        mark(graph, "quantize_q", False)  # as in decode steps, so that all steps give the same bits
    if bucket is not None and bucket.verifies:
        mark(graph, "rows", bucket.rows)
    if exact:
        mark(graph, "exact", True)
    sweep(graph)
    exact_tokens = DECODE_TOKENS if decode else PROMPT_TOKENS
    fit_tiles(graph, specs, size_independent, exact_tokens if exact else None)
    _set_inputs(graph, graph_module, specs)
    propagate(graph)
    return graph


def propagate(graph: fx.Graph) -> None:
    """Recompute every node's value from the inputs, fold integers, and remove unused nodes.

    Raises SpecializeError with the node that fails at these sizes.
    """
    sweep(graph)
    _compute(graph)
    while sweep(graph):
        _compute(graph)


def is_own(node: fx.Node) -> bool:
    """Return whether a node calls one of Sidestream's ops."""
    overload = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return overload and node.target.namespace == NAMESPACE  # type: ignore[union-attr]


def own_name(node: fx.Node) -> str:
    """Return `rms_norm` for a call of sidestream::rms_norm, else ""."""
    return op_name(node).removeprefix(f"{NAMESPACE}.") if is_own(node) else ""


def erase_parts(graph: fx.Graph) -> None:
    """Remove the ops of adapters' parts and LoRA on the embedding and the output head.

    Readers read the value that these would have changed.
    """
    for node in list(graph.nodes):
        operand = PART_OPS.get(own_name(node))
        if operand is not None:
            node.replace_all_uses_with(getattr(bind(node), operand))
            graph.erase_node(node)
        if own_name(node) == "embedding" and bind(node).lora_a is not None:
            set_operands(node, lora_a=None, lora_b=None, adapter_index=None)
    erase_lora(graph, "lm_head")


def erase_lora(graph: fx.Graph, module: str = "") -> None:
    """Remove LoRA, all or of one module: optional deltas become None, and a sum becomes its other operand."""
    erased: set[fx.Node] = set()
    for node in list(graph.nodes):
        if own_name(node) in LORA_OPS and any(module in source.name for source in node.all_input_nodes):
            erased.add(node)
            continue
        gone = [source for source in node.all_input_nodes if source in erased]
        # a size does not depend on values; its operand is erased when the size is folded
        if not gone or node.target is aten.sym_size.int:
            continue
        if node.target in SUMS:
            kept = [operand for operand in node.args if operand not in erased]
            if kept:
                node.replace_all_uses_with(kept[0])
            erased.add(node)
        elif is_own(node) and node.target not in ZERO_PRESERVING:
            _drop_optional(node, erased)
        elif node.target in ZERO_PRESERVING and (
            node.target is not aten.cat.default or len(gone) == len(node.all_input_nodes)
        ):
            erased.add(node)
        else:
            where = "the graph returns" if node.op == "output" else f"{op_name(node)} ({node.name}) reads"
            raise SpecializeError(
                f"{where} the LoRA delta {gone[0].name}, so there is no program without LoRA; use a bucket with "
                "lora=True"
            )


def _drop_optional(node: fx.Node, erased: set[fx.Node]) -> None:
    bound = bind(node)
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        value = getattr(bound, argument.name)
        if isinstance(value, fx.Node) and value in erased:
            if not isinstance(argument.type, torch.OptionalType):
                raise SpecializeError(
                    f"{op_name(node)} ({node.name}) needs its argument {argument.name!r}, a LoRA delta; use a bucket "
                    "with lora=True"
                )
            set_operands(node, **{argument.name: None})


def mark(graph: fx.Graph, name: str, value: Any) -> None:
    """Set the operand `name` of every op of Sidestream that has it."""
    for node in graph.nodes:
        if is_own(node) and has_operand(node, name):
            set_operands(node, **{name: value})


def take_every_row(graph: fx.Graph) -> None:
    """Remove selections of logits rows that select all rows in order."""
    for node in list(graph.nodes):
        if is_call(node, aten.index_select.default):
            selection = bind(node)
            if selection.dim in (0, -2) and getattr(selection.index, "name", "") == "logits_indices":
                node.replace_all_uses_with(selection.self)


def fit_tiles(
    graph: fx.Graph, specs: Mapping[str, Spec], size_independent: bool = False, exact_tokens: int | None = None
) -> None:
    """Set the tiles of plans and the number of splits of LoRA kernels for this token count, or for `exact_tokens`."""
    spec = specs.get("adapter_index")
    if spec is None or isinstance(spec, int):
        return
    tokens = int(spec.shape[0] if isinstance(spec, torch.Tensor) else spec[0][0])
    for node in graph.nodes:
        name, plan = own_name(node), group_plan_of(node)
        if name not in LORA_OPS and plan is None:
            continue
        rows, tile = exact_tokens or tokens, lora_tile(exact_tokens or tokens)
        if plan is not None:
            groups = through_views(bind(plan).groups)
            of_lora = own_name(groups) == "expert_groups"
            rows = tokens * int(shape_of(bind(groups).experts if of_lora else groups)[1])
            tile = (pair_tile if of_lora else expert_tile)(rows, bind(plan).num_groups)
        if has_operand(node, "tile"):
            set_operands(node, tile=tile)
        if has_operand(node, "splits"):
            one_plane = size_independent and exact_tokens is None
            set_operands(node, splits=1 if one_plane else lora_splits(int(shape_of(bind(node).x)[-1]), rows))


def sweep(graph: fx.Graph) -> bool:
    """Remove unused nodes except mutations, clear `keep` flags of unused results; return whether one was cleared."""
    cleared = False
    for node in reversed(list(graph.nodes)):
        if node.op == "output":
            continue
        if not node.users and not _mutates(node):
            graph.erase_node(node)
            continue
        keeps = is_own(node) and has_operand(node, "keep") and bind(node).keep
        if keeps and not any(place == 0 for place, _ in picks_of(node)):
            set_operands(node, keep=False)
            cleared = True
    return cleared


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _set_inputs(graph: fx.Graph, module: fx.GraphModule, specs: Mapping[str, Spec]) -> None:
    for node in placeholders(graph):
        if node.name not in specs:
            raise SpecializeError(f"no size is given for input {node.name}; given: {', '.join(specs) or 'none'}")
        node.meta["val"] = _placeholder_value(specs[node.name])
    for node in graph.find_nodes(op="get_attr"):
        node.meta["val"] = operator.attrgetter(str(node.target))(module).to(META)


def _compute(graph: fx.Graph) -> None:
    folded: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                value = node.meta["val"]
            elif node.op == "call_function":
                if folded and any(source in folded for source in node.all_input_nodes):
                    node.args = fx.map_arg(node.args, lambda source: folded.get(source, source))
                    node.kwargs = fx.map_arg(node.kwargs, lambda source: folded.get(source, source))
                value = _call(node)
            elif node.op == "output":
                node.args = fx.map_arg(node.args, lambda source: folded.get(source, source))
                continue
            else:
                raise SpecializeError(f"node {node.name} is a {node.op}; a captured graph has calls of functions only")
            if isinstance(value, (bool, int, float)):
                folded[node] = value
            else:
                node.meta["val"] = value
    for node in reversed(folded):
        graph.erase_node(node)


def _placeholder_value(spec: Spec) -> Any:
    if isinstance(spec, int):
        return spec
    if isinstance(spec, torch.Tensor):
        return torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device=META)
    shape, dtype = spec
    return torch.empty_strided(shape, contiguous_strides(tuple(shape)), dtype=dtype, device=META)


def _call(node: fx.Node) -> Any:
    if isinstance(node.target, torch._ops.OpOverload) and not is_own(node):
        _place(node)
    args: Any = fx.map_arg(node.args, lambda source: source.meta["val"])
    kwargs: Any = fx.map_arg(node.kwargs, lambda source: source.meta["val"]) if node.kwargs else {}
    try:
        if is_own(node) and not kwargs:
            return OPS[own_name(node)].fake(*args)  # a direct call is faster than the dispatcher
        if node.target is aten.sym_size.int:
            return args[0].size(args[1])
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        values = ((source.name, source.meta["val"]) for source in node.all_input_nodes)
        shapes = ", ".join(f"{name}: {tuple(getattr(value, 'shape', ()))}" for name, value in values)
        raise SpecializeError(f"{node.name} = {op_name(node)}(...) fails at these sizes ({shapes}): {error}") from error


def _place(node: fx.Node) -> None:
    """Set every device argument to meta, also for ops that create tensors."""
    if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
        node.args = tuple(META if isinstance(value, torch.device) else value for value in node.args)
        node.kwargs = {name: META if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
    if has_operand(node, "device") and not node.all_input_nodes and bind(node).device is None:
        set_operands(node, device=META)
