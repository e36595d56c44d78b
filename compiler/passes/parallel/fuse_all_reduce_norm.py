"""The sum over the ranks and the norm that reads it -> `sidestream.all_reduce_add_rms_norm_quant`."""

from torch import fx

from ....ops.collectives.all_reduce import all_reduce
from ....ops.collectives.all_reduce_add_rms_norm_quant import all_reduce_add_rms_norm_quant
from ....ops.elementwise.rms_norm import add_rms_norm_quant
from ...graph.nodes import aten, bind, insert_call, is_call, picks_of, set_operands, shape_of, split_delta
from ..base import Context, PassReport

RESIDUAL = 3  # the place of the new residual among the results


def fuse_all_reduce_norm(graph: fx.Graph, context: Context) -> PassReport:
    """Partial results of the ranks, and their LoRA deltas, are added up by the norm that reads them.

    before  add = linear + lora; o = sidestream.all_reduce(add, "tp2")
            _, q, s, r = sidestream.add_rms_norm_quant(o, residual, None, weight, ...)
    after   _, q, s, r = sidestream.all_reduce_add_rms_norm_quant(linear, residual, lora, weight, ..., "tp2", ...)

    The sum is no longer rounded before the residual joins it. Where the new residual goes to norms of this kind alone,
    `spread` lets a rank keep its own rows of it. Matches every sum that one quantizing norm reads. Leaves the others,
    such as the last of a program whose rows are selected after the last norm.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, all_reduce):
            continue
        norm = next(iter(node.users))
        reason = _stays(node, norm)
        if reason is not None:
            report.rejected.append(f"{node.name}: {reason}")
            continue
        made, summed = bind(norm), bind(node)
        residual = made.residual if made.x is node else made.x
        partial, delta = _partial_and_delta(summed.partial)
        with graph.inserting_before(norm):
            operands = (partial, residual, delta, made.weight, made.eps, summed.group)
            formed = (made.keep, made.dtype, made.rotate)
            new = insert_call(graph, all_reduce_add_rms_norm_quant, (*operands, *formed), like=norm)
        norm.replace_all_uses_with(new)
        graph.erase_node(norm)  # or it would count as a reader of the residual below
        report.matches += 1
    for node in graph.nodes:
        if is_call(node, all_reduce_add_rms_norm_quant):
            set_operands(node, spread=_stays_with_owners(node))
    return report


def _stays(node: fx.Node, norm: fx.Node) -> str | None:
    """Why a sum is left as it is."""
    if len(node.users) > 1:
        return f"its sum is read by {', '.join(user.name for user in node.users)}"
    if not is_call(norm, add_rms_norm_quant):
        return f"{norm.name} is no norm that quantizes"
    if bind(norm).delta is not None:
        return f"{norm.name} adds {bind(norm).delta.name}, which no rank has a part of"
    return None


def _partial_and_delta(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The two terms of a rank's part, if it is the sum of two that nobody else reads."""
    partial, delta = split_delta(value)
    if delta is None and is_call(value, aten.add.Tensor) and bind(value).alpha == 1:  # LoRA has become kernels already
        partial, delta = bind(value).self, bind(value).other
    if len(value.users) > 1 or not isinstance(delta, fx.Node) or shape_of(partial) != shape_of(delta):
        return value, None
    return partial, delta


def _stays_with_owners(node: fx.Node) -> bool:
    """Whether the new residual is read as the residual of such norms alone."""
    residuals = [pick for place, pick in picks_of(node) if place == RESIDUAL]
    return all(
        is_call(user, all_reduce_add_rms_norm_quant) and bind(user).names_of(pick) == ["residual"]
        for pick in residuals
        for user in pick.users
    )
