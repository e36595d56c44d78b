"""The sum over the ranks and the norm that reads it -> `sidestream.all_reduce_add_rms_norm_quant`."""

from torch import fx

from ....ops.collectives.all_reduce import all_reduce
from ....ops.collectives.all_reduce_add_rms_norm_quant import all_reduce_add_rms_norm_quant
from ....ops.elementwise.rms_norm import add_rms_norm_quant
from ...graph.nodes import aten, bind, calls, insert_call, is_call, picks_of, set_operands, shape_of, split_delta
from ..base import Context, PassReport, Refused, rewrite_each

RESIDUAL = 3  # index of the new residual in the results


def fuse_all_reduce_norm(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse the sum over the ranks, of partial results and their LoRA deltas, into the quantizing norm that reads it.

    before  add = linear + lora; o = sidestream.all_reduce(add, "tp2")
            _, q, s, r = sidestream.add_rms_norm_quant(o, residual, None, weight, ...)
    after   _, q, s, r = sidestream.all_reduce_add_rms_norm_quant(linear, residual, lora, weight, ..., "tp2", ...)

    The sum is not rounded before the residual is added. If only such norms read the new residual, `spread` lets each
    rank store its own rows of it only. Leaves sums with other readers, such as the last one (rows are selected).
    """

    def fuse(node: fx.Node) -> None:
        norm = next(iter(node.users))
        _check(node, norm)
        made, summed = bind(norm), bind(node)
        residual = made.residual if made.x is node else made.x
        partial, delta = _partial_and_delta(summed.partial)
        with graph.inserting_before(norm):
            operands = (partial, residual, delta, made.weight, made.eps, summed.group)
            formed = (made.keep, made.dtype, made.rotate)
            new = insert_call(graph, all_reduce_add_rms_norm_quant, (*operands, *formed), like=norm)
        norm.replace_all_uses_with(new)
        graph.erase_node(norm)  # or it would count as a reader of the residual below

    report = rewrite_each(calls(graph, all_reduce), fuse)
    for node in calls(graph, all_reduce_add_rms_norm_quant):
        set_operands(node, spread=_stays_with_owners(node))
    return report


def _check(node: fx.Node, norm: fx.Node) -> None:
    if len(node.users) > 1:
        raise Refused(f"its sum is read by {', '.join(user.name for user in node.users)}")
    if not is_call(norm, add_rms_norm_quant):
        raise Refused(f"{norm.name} is not a quantizing norm")
    if bind(norm).delta is not None:
        raise Refused(f"{norm.name} adds {bind(norm).delta.name}, which is not a partial result")


def _partial_and_delta(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return (partial result, delta) of a rank's sum of both; (value, None) for other values."""
    partial, delta = split_delta(value)
    if delta is None and is_call(value, aten.add.Tensor) and bind(value).alpha == 1:  # LoRA has become kernels already
        partial, delta = bind(value).self, bind(value).other
    if len(value.users) > 1 or not isinstance(delta, fx.Node) or shape_of(partial) != shape_of(delta):
        return value, None
    return partial, delta


def _stays_with_owners(node: fx.Node) -> bool:
    """Return whether all readers of the new residual are such norms, with it as their residual."""
    residuals = [pick for place, pick in picks_of(node) if place == RESIDUAL]
    return all(
        is_call(user, all_reduce_add_rms_norm_quant) and bind(user).names_of(pick) == ["residual"]
        for pick in residuals
        for user in pick.users
    )
