"""The weighted sum of a token's experts and the norm that reads it -> `sidestream.combine_add_rms_norm`."""

from torch import fx

from ....ops.elementwise.combine_rms_norm import combine_add_rms_norm
from ....ops.elementwise.rms_norm import add_rms_norm
from ....ops.moe.combine import moe_combine
from ...graph.nodes import bind, calls, insert_call, is_call, set_operands, split_delta
from ..base import Context, PassReport, Refused, rewrite_each


def fuse_combine_norm(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse the weighted sum of a token's experts, and the addition of their LoRA delta, into the norm that reads it.

    before  add = expert_linear + expert_lora; total = sidestream.moe_combine(add, weights)
            y, r = sidestream.add_rms_norm(total, residual, None, gain, 1e-05)
    after   y, r = sidestream.combine_add_rms_norm(expert_linear, weights, expert_lora, residual, gain, 1e-05)

    The sum is not rounded before the residual is added. Leaves sums with other readers: with tensor_parallel, the sum
    over the ranks. They only take over the addition of the delta.
    """

    def fuse(node: fx.Node) -> None:
        z, delta = split_delta(bind(node).z)
        if delta is not None and bind(node).delta is None:
            set_operands(node, z=z, delta=delta)
        combined, norm = bind(node), next(iter(node.users))
        if (
            len(node.users) > 1
            or not is_call(norm, add_rms_norm)
            or bind(norm).x is not node
            or bind(norm).delta is not None
        ):
            raise Refused(f"{', '.join(user.name for user in node.users)} is not a norm that only adds it")
        added = bind(norm)
        with graph.inserting_before(norm):
            operands = (combined.z, combined.weights, combined.delta, added.residual, added.weight, added.eps)
            norm.replace_all_uses_with(insert_call(graph, combine_add_rms_norm, operands, like=norm))

    return rewrite_each(calls(graph, moe_combine), fuse)
