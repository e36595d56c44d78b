"""Projections of the same activation become one: q/k/v and gate/up."""

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from ...ops.lora.lora import lora
from ..graph.nodes import args_of, aten, insert_call, insert_placeholder, is_call, shape_of, through_views
from ..graph.recipe import cat, pad, zeros
from .base import Context, PassReport


@dataclass
class _Branch:
    """One linear of a group: its node, and beside it the LoRA node and the addition that joins the two (None without
    LoRA).
    """

    linear: fx.Node
    lora: fx.Node | None
    joined: fx.Node

    @property
    def weight(self) -> fx.Node:
        return args_of(self.linear)[1]

    @property
    def width(self) -> int:
        return int(shape_of(self.weight)[0])


def pack_projections(graph: fx.Graph, context: Context) -> PassReport:
    """One GEMM, one shrink and one expand where several linears read the same activation.

    before  linear = aten.linear(x, q); linear_1 = aten.linear(x, k); linear_2 = aten.linear(x, v)          # + lora of
            each
    after   linear_3 = aten.linear(x, q_k_v); lora_3 = sidestream.lora(x, a, b, adapter_index, [4096, 1024, 1024])
            add = linear_3 + lora_3; slice = add[..., :4096]; slice_1 = add[..., 4096:5120]; ...

    Matches groups of two or more linears without bias whose weights are loaded. A member without LoRA beside members
    with it gets zeros. Leaves a linear that has its input to itself, and groups whose LoRA branches read different
    adapter indices.
    """
    report = PassReport(0)
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_call(node, aten.linear.default) and args_of(node)[1].meta.get("kind") == "weight":
            groups[args_of(node)[0]].append(node)
    for x, linears in groups.items():
        if len(linears) < 2:
            continue
        branches = [_branch(linear) for linear in linears]
        reason = _refusal(branches)
        if reason is not None:
            report.rejected.append(f"{', '.join(node.name for node in linears)}: {reason}")
            continue
        _pack(graph, x, branches)
        report.matches += 1
    return report


def _branch(linear: fx.Node) -> _Branch:
    users = list(linear.users)
    if len(users) == 1 and is_call(users[0], aten.add.Tensor):
        other = next((arg for arg in args_of(users[0]) if arg is not linear), None)
        delta = through_views(other)
        if is_call(delta, lora) and through_views(args_of(delta)[0]) is through_views(args_of(linear)[0]):
            return _Branch(linear, delta, users[0])
    return _Branch(linear, None, linear)


def _refusal(branches: list[_Branch]) -> str | None:
    for branch in branches:
        if len(args_of(branch.linear)) > 2 and args_of(branch.linear)[2] is not None:
            return f"{branch.linear.name} has a bias"
    indices = {args_of(branch.lora)[3] for branch in branches if branch.lora is not None}
    slots = {shape_of(args_of(branch.lora)[1])[0] for branch in branches if branch.lora is not None}
    if len(slots) > 1 or len(indices) > 1:
        return "their LoRA branches read different adapter stacks or indices"
    return None


def _pack(graph: fx.Graph, x: fx.Node, branches: list[_Branch]) -> None:
    weights = [branch.weight for branch in branches]
    widths = [branch.width for branch in branches]
    packed = insert_placeholder(
        graph,
        _joined_name(weights),
        "weight",
        (sum(widths), int(shape_of(weights[0])[1])),
        weights[0].meta["val"].dtype,
        after=weights[0],
        recipe=cat(0, [weight.meta["recipe"] for weight in weights]),
    )
    first = branches[0].linear
    with graph.inserting_before(first):
        joined = insert_call(graph, aten.linear.default, (x, packed), like=first)
        if any(branch.lora is not None for branch in branches):
            joined = insert_call(graph, aten.add.Tensor, (joined, _packed_lora(graph, branches, joined)), like=first)
        offset = 0
        for branch, width in zip(branches, widths, strict=True):
            part = insert_call(graph, aten.slice.Tensor, (joined, -1, offset, offset + width), like=branch.linear)
            branch.joined.replace_all_uses_with(part)
            offset += width


def _packed_lora(graph: fx.Graph, branches: list[_Branch], linear: fx.Node) -> fx.Node:
    """One LoRA branch over the stacked A and B of all members, in the shape of the packed linear."""
    deltas = [branch.lora for branch in branches if branch.lora is not None]
    x, a, b, index, _ = args_of(deltas[0])
    slots, _, width_in = (int(size) for size in shape_of(a))
    dtype = a.meta["val"].dtype
    rank = max(int(shape_of(args_of(delta)[1])[1]) for delta in deltas)
    parts_a, parts_b = [], []
    for branch in branches:
        if branch.lora is None:
            parts_a.append(zeros((1, rank, width_in), dtype))
            parts_b.append(zeros((1, branch.width, rank), dtype))
        else:
            parts_a.append(pad(args_of(branch.lora)[1].meta["recipe"], 1, rank))
            parts_b.append(pad(args_of(branch.lora)[2].meta["recipe"], 2, rank))
    widths = [branch.width for branch in branches]
    names = [_joined_name([args_of(delta)[place] for delta in deltas]) for place in (1, 2)]
    packed_a = insert_placeholder(
        graph, names[0], "adapter", (slots, rank * len(branches), width_in), dtype, after=a, recipe=cat(1, parts_a)
    )
    packed_b = insert_placeholder(
        graph, names[1], "adapter", (slots, sum(widths), rank), dtype, after=b, recipe=cat(1, parts_b)
    )
    delta = insert_call(graph, lora, (x, packed_a, packed_b, index, widths), like=deltas[0])
    return delta if len(shape_of(linear)) == 2 else insert_call(graph, aten.view.default, (delta, [*shape_of(linear)]))


def _joined_name(nodes: list[fx.Node]) -> str:
    """`layers_0_self_attn_q_proj_weight`, `..._k_proj_weight` -> `layers_0_self_attn_q_k_proj_weight`."""
    if len(nodes) == 1:
        return f"{nodes[0].name}_packed"
    parts = [node.name.split("_") for node in nodes]
    first = parts[0]
    front = next(place for place, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1)
    back = next(
        place for place, words in enumerate(zip(*(part[::-1] for part in parts), strict=False)) if len(set(words)) > 1
    )
    return "_".join(
        [
            *first[:front],
            *(word for part in parts for word in part[front : len(part) - back]),
            *first[len(first) - back :],
        ]
    )
