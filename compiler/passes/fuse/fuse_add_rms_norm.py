"""Residual addition + RMS norm -> `sidestream.add_rms_norm`."""

from torch import fx

from ....ops.elementwise.rms_norm import add_rms_norm, rms_norm
from ...graph.nodes import aten, bind, calls, insert_call, insert_picks, is_call, shape_of, split_delta
from ..base import Context, PassReport, Refused, rewrite_each


def fuse_add_rms_norm(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse the addition to the residual stream (and of the LoRA delta, if any) into the norm that reads it.

    before  add = linear + lora; add_1 = residual + add; rms_norm = sidestream.rms_norm(add_1, weight, 1e-05)
    after   add_rms_norm = sidestream.add_rms_norm(linear, residual, lora, weight, 1e-05)
            y = add_rms_norm[0]; add_1 = add_rms_norm[1]

    Leaves norms of anything but a sum of two equal shapes: in a Llama, the first layer's norm of the embedding.
    """

    def fuse(norm: fx.Node) -> None:
        total, weight, eps = bind(norm).x, bind(norm).weight, bind(norm).eps
        if not is_call(total, aten.add.Tensor) or bind(total).alpha != 1 or not isinstance(bind(total).other, fx.Node):
            raise Refused(f"{total.name} is not a sum")
        residual, update = bind(total).self, bind(total).other
        if shape_of(residual) != shape_of(update):
            raise Refused(f"{residual.name} and {update.name} have different shapes")
        x, delta = split_delta(update)
        if delta is None and split_delta(residual)[1] is not None:
            residual, (x, delta) = update, split_delta(residual)
        with graph.inserting_before(total):
            new = insert_call(graph, add_rms_norm, (x, residual, delta, weight, eps), like=norm)
            picked = insert_picks(graph, new, (0, 1), like=norm)
        norm.replace_all_uses_with(picked[0])
        total.replace_all_uses_with(picked[1], delete_user_cb=lambda user: user is not new)

    return rewrite_each(calls(graph, rms_norm), fuse)
