"""Linears that read the same activation -> one linear: q/k/v and gate/up."""

from collections import defaultdict

import torch
from torch import fx

from ....ops.lora.adjust import lora_adjust
from ....ops.lora.lora import lora
from ...graph.nodes import aten, bind, calls, insert_call, insert_placeholder, shape_of
from ...graph.projections import Branch, branch_of
from ...graph.recipe import cat, pad, zeros
from ..base import Context, PassReport


def pack_projections(graph: fx.Graph, context: Context) -> PassReport:
    """Pack linears that read the same activation (q/k/v, gate/up) into one GEMM, with one LoRA shrink and expand.

    before  linear = aten.linear(x, q); linear_1 = aten.linear(x, k); linear_2 = aten.linear(x, v)  # + lora of each
    after   linear_3 = aten.linear(x, q_k_v); lora_3 = sidestream.lora(x, a, b, adapter_index, [4096, 1024, 1024])
            add = linear_3 + lora_3; slice = add[..., :4096]; slice_1 = add[..., 4096:5120]; ...

    Biases (separate after `lift_bias`), gains and shifts are packed too. Members without them or LoRA get zeros. Leaves
    linears with computed weights, and groups with LoRA branches on different adapter indices.
    """
    report = PassReport(0)
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in calls(graph, aten.linear.default):
        if bind(node).weight.meta.get("kind") == "weight":
            groups[bind(node).input].append(node)
    for x, linears in groups.items():
        if len(linears) < 2:
            continue
        branches = [branch_of(linear) for linear in linears]
        reason = _refusal(branches)
        if reason is not None:
            report.rejected.append(f"{', '.join(node.name for node in linears)}: {reason}")
            continue
        _pack(graph, x, branches)
        report.matches += 1
    return report


def _refusal(branches: list[Branch]) -> str | None:
    for branch in branches:
        if bind(branch.linear).bias is not None:
            return f"{branch.linear.name} has a bias (is lift_bias off?)"
    deltas = [bind(branch.lora) for branch in branches if branch.lora is not None]
    indices, slots = {delta.adapter_index for delta in deltas}, {shape_of(delta.a)[0] for delta in deltas}
    if len(slots) > 1 or len(indices) > 1:
        return "their LoRA branches read different adapter stacks or indices"
    return None


def _pack(graph: fx.Graph, x: fx.Node, branches: list[Branch]) -> None:
    weights = [branch.weight for branch in branches]
    widths = [branch.width for branch in branches]
    shape, dtype = (sum(widths), int(shape_of(weights[0])[1])), weights[0].meta["val"].dtype
    recipe = cat(0, [weight.meta["recipe"] for weight in weights])
    name = _joined_name(weights)
    packed = insert_placeholder(graph, name, "weight", shape, dtype, after=weights[0], recipe=recipe)
    first = branches[0].linear
    with graph.inserting_before(first):
        joined = insert_call(graph, aten.linear.default, (x, packed), like=first)
        if any(branch.adjust is not None for branch in branches):
            joined = _packed_adjust(graph, branches, joined)
        if any(branch.bias is not None for branch in branches):
            joined = insert_call(graph, aten.add.Tensor, (joined, _packed_bias(graph, branches)), like=first)
        if any(branch.lora is not None for branch in branches):
            joined = insert_call(graph, aten.add.Tensor, (joined, _packed_lora(graph, branches, joined)), like=first)
        offset = 0
        for branch, width in zip(branches, widths, strict=True):
            part = insert_call(graph, aten.slice.Tensor, (joined, -1, offset, offset + width), like=branch.linear)
            branch.joined.replace_all_uses_with(part)
            offset += width


def _packed_adjust(graph: fx.Graph, branches: list[Branch], linear: fx.Node) -> fx.Node:
    """Insert one adjustment with the gains and shifts of all members; at most one member's columns are rotated."""
    nodes = [branch.adjust for branch in branches if branch.adjust is not None]
    stacks: list[fx.Node | None] = []
    for name in ("gain", "shift"):
        given = [stack for node in nodes if (stack := getattr(bind(node), name)) is not None]
        if not given:
            stacks.append(None)
            continue
        parts = [zeros((1, branch.width), torch.float32) for branch in branches]
        for place, branch in enumerate(branches):
            stack = None if branch.adjust is None else getattr(bind(branch.adjust), name)
            parts[place] = parts[place] if stack is None else stack.meta["recipe"]
        shape = (int(shape_of(given[0])[0]), sum(branch.width for branch in branches))
        recipe, label = cat(1, parts), _joined_name(given)
        stacks.append(insert_placeholder(graph, label, "adapter", shape, torch.float32, after=given[0], recipe=recipe))
    rotated, offset = (0, 0, 0), 0
    for branch in branches:
        if branch.adjust is not None and bind(branch.adjust).rotate:
            rotated = (bind(branch.adjust).rotate, offset, offset + branch.width)
        offset += branch.width
    return insert_call(graph, lora_adjust, (linear, *stacks, bind(nodes[0]).adapter_index, *rotated), like=nodes[0])


def _packed_bias(graph: fx.Graph, branches: list[Branch]) -> fx.Node:
    """Insert the biases of all members as one vector."""
    nodes = [branch.bias for branch in branches if branch.bias is not None]
    dtype = nodes[0].meta["val"].dtype
    parts = [
        zeros((branch.width,), dtype) if branch.bias is None else branch.bias.meta["recipe"] for branch in branches
    ]
    size = (sum(branch.width for branch in branches),)
    return insert_placeholder(graph, _joined_name(nodes), "weight", size, dtype, after=nodes[0], recipe=cat(0, parts))


def _packed_lora(graph: fx.Graph, branches: list[Branch], linear: fx.Node) -> fx.Node:
    """Insert one LoRA branch over the stacked A and B of all members, in the shape of the packed linear."""
    nodes = [branch.lora for branch in branches if branch.lora is not None]
    deltas = [bind(node) for node in nodes]
    first = deltas[0]
    slots, _, width_in = (int(size) for size in shape_of(first.a))
    dtype = first.a.meta["val"].dtype
    rank = max(int(shape_of(delta.a)[1]) for delta in deltas)
    parts_a, parts_b = [], []
    for branch in branches:
        if branch.lora is None:
            parts_a.append(zeros((1, rank, width_in), dtype))
            parts_b.append(zeros((1, branch.width, rank), dtype))
        else:
            parts_a.append(pad(bind(branch.lora).a.meta["recipe"], 1, rank))
            parts_b.append(pad(bind(branch.lora).b.meta["recipe"], 2, rank))
    widths = [branch.width for branch in branches]
    names = _joined_name([delta.a for delta in deltas]), _joined_name([delta.b for delta in deltas])
    shapes = (slots, rank * len(branches), width_in), (slots, sum(widths), rank)
    packed_a, packed_b = (
        insert_placeholder(graph, name, "adapter", shape, dtype, after=after, recipe=cat(1, parts))
        for name, shape, after, parts in zip(names, shapes, (first.a, first.b), (parts_a, parts_b), strict=True)
    )
    delta = insert_call(graph, lora, (first.x, packed_a, packed_b, first.adapter_index, widths), like=nodes[0])
    return delta if len(shape_of(linear)) == 2 else insert_call(graph, aten.view.default, (delta, [*shape_of(linear)]))


def _joined_name(nodes: list[fx.Node]) -> str:
    """Join names: `layers_0_self_attn_q_proj_weight`, `..._k_proj_weight` -> `layers_0_self_attn_q_k_proj_weight`."""
    if len(nodes) == 1:
        return f"{nodes[0].name}_packed"
    parts = [node.name.split("_") for node in nodes]
    first = parts[0]
    front = next(place for place, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1)
    ends = zip(*(part[::-1] for part in parts), strict=False)
    back = next(place for place, words in enumerate(ends) if len(set(words)) > 1)
    middle = [word for part in parts for word in part[front : len(part) - back]]
    return "_".join([*first[:front], *middle, *first[len(first) - back :]])
