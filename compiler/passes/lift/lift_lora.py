"""LoRA branches -> `sidestream.lora`, one pattern per implementation of LoRA."""

from math import prod

import torch
from torch import fx

from ....ops.lora.lora import lora
from ...graph.matcher import Match, any_, call, cast, const, find
from ...graph.nodes import DELTAS, aten, insert_call, insert_placeholder, is_call, shape_of
from ...graph.recipe import Recipe, pad, scale, unsqueeze
from ...graph.recipe import cast as cast_recipe
from ..base import Context, PassReport

RANK_STEP = 16

# Sidestream's Llama: stacked adapters, one index per token, -1 for no adapter.
_slot = call(aten.clamp.default, any_("adapter_index"), 0)
_shrunk = call(
    aten.bmm.default, call(aten.index.Tensor, any_("a"), [_slot]), call(aten.unsqueeze.default, any_("x"), -1)
)
_expanded = call(aten.squeeze.dim, call(aten.bmm.default, call(aten.index.Tensor, any_("b"), [_slot]), _shrunk), -1)
_active = call(aten.unsqueeze.default, call(aten.ge.Scalar, any_("adapter_index"), 0), -1)
STACKED = _expanded * cast(_active)

# transformers' Llama with peft: one adapter for all tokens, scaled after B.
PEFT = call(aten.linear.default, call(aten.linear.default, cast(any_("x")), any_("a")), any_("b")) * const("scaling")


def lift_lora(graph: fx.Graph, context: Context) -> PassReport:
    """Replace the low-rank branch next to a linear by one op.

    before  linear_1 = aten.linear(x, lora_A); linear_2 = aten.linear(linear_1, lora_B); mul = linear_2 * 2.0
    after   lora = sidestream.lora(x, lora_a, lora_b, adapter_index, [4096])
            # lora_a, lora_b: stacks by adapter slot

    Matches stacked adapters with an index per token (Sidestream's Llama) and peft's single adapter: its scaling moves
    into B's recipe, and its rank is padded to a multiple of 16. Leaves branches with computed A or B (merged or
    quantized adapters).
    """
    stacked, _ = find(graph, STACKED)
    for match in stacked:
        operands = (match["x"], match["a"], match["b"], match["adapter_index"], [int(shape_of(match["b"])[1])])
        with graph.inserting_before(match.root):
            match.root.replace_all_uses_with(insert_call(graph, lora, operands, like=match.root))

    def where(match: Match) -> str | None:
        for name in ("a", "b"):
            if match[name].op != "placeholder":
                return f"{match[name].name} is computed in the graph, not loaded"
        return None

    single, rejected = find(graph, PEFT, where=where)
    shared: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for match in single:
        _lift_single(graph, match, shared)
    return PassReport(len(stacked) + len(single), rejected + _near_misses(graph))


def _lift_single(graph: fx.Graph, match: Match, shared: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> None:
    """Lift peft's branch to stacks of one slot, which all tokens use.

    `shared`: activation -> (its flattened form, its adapter index), for branches with the same activation.
    """
    x, a, b = match["x"], match["a"], match["b"]
    rank, width = int(shape_of(a)[0]), int(shape_of(b)[0])
    padded = -(-rank // RANK_STEP) * RANK_STEP
    dtype = x.meta["val"].dtype
    stacks = []
    for node, dim, factor in ((a, 0, 1.0), (b, 1, float(match["scaling"]))):
        recipe: Recipe = unsqueeze(pad(cast_recipe(scale(node.meta["recipe"], factor), dtype), dim, padded), 0)
        shape = (1, padded, int(shape_of(a)[1])) if dim == 0 else (1, width, padded)
        stacks.append(
            insert_placeholder(graph, f"{node.name}_stack", "adapter", shape, dtype, after=node, recipe=recipe)
        )
    leading = shape_of(x)[:-1]
    if x not in shared:
        with graph.inserting_after(x):
            flat = insert_call(graph, aten.view.default, (x, [prod(leading), shape_of(x)[-1]]))
        slots = next((index for other, (_, index) in shared.items() if shape_of(other)[:-1] == leading), None)
        if slots is None:
            with graph.inserting_after(flat):
                zeros = insert_call(graph, aten.new_zeros.default, (flat, [prod(leading)]))
            with graph.inserting_after(zeros):
                slots = insert_call(graph, aten.to.dtype, (zeros, torch.int32))
        shared[x] = flat, slots
    flat, slots = shared[x]
    with graph.inserting_before(match.root):
        delta = insert_call(graph, lora, (flat, *stacks, slots, [width]), like=match.root)
        shaped = insert_call(graph, aten.view.default, (delta, [*leading, width]))
    match.root.replace_all_uses_with(shaped)


def _near_misses(graph: fx.Graph) -> list[str]:
    """Return near-misses: readers of inputs named lora_a that are not lifted."""
    stacks = [node for node in graph.nodes if node.op == "placeholder" and "lora_a" in node.name.lower()]
    return [
        f"{user.name}: reads {node.name} in a form without a LoRA pattern"
        for node in stacks
        for user in node.users
        if not is_call(user, *DELTAS) and not _is_dead(user)
    ]


def _is_dead(node: fx.Node) -> bool:
    """Return whether `node` has no live reader; the driver removes such nodes after the pass."""
    return not node.is_impure() and all(_is_dead(user) for user in node.users)
