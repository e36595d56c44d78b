"""Residual addition + RMS norm -> `sidestream.add_rms_norm`."""

from torch import fx

from ....ops.elementwise.rms_norm import add_rms_norm, rms_norm
from ...graph.nodes import aten, bind, insert_call, insert_picks, is_call, shape_of, split_delta
from ..base import Context, PassReport


def fuse_add_rms_norm(graph: fx.Graph, context: Context) -> PassReport:
    """The residual stream's addition (and the LoRA delta's, if there is one) moves into the norm that reads it.

    before  add = linear + lora; add_1 = residual + add; rms_norm = sidestream.rms_norm(add_1, weight, 1e-05)
    after   add_rms_norm = sidestream.add_rms_norm(linear, residual, lora, weight, 1e-05)
            y = add_rms_norm[0]; add_1 = add_rms_norm[1]

    Matches norms of a sum. Leaves norms of something that is no sum of two equal shapes: in a Llama, the first layer's
    norm of the embedding.
    """
    report = PassReport(0)
    for norm in list(graph.nodes):
        if not is_call(norm, rms_norm):
            continue
        total, weight, eps = bind(norm).x, bind(norm).weight, bind(norm).eps
        if not is_call(total, aten.add.Tensor) or bind(total).alpha != 1 or not isinstance(bind(total).other, fx.Node):
            report.rejected.append(f"{norm.name}: {total.name} is not a sum")
            continue
        residual, update = bind(total).self, bind(total).other
        if shape_of(residual) != shape_of(update):
            report.rejected.append(f"{norm.name}: {residual.name} and {update.name} have different shapes")
            continue
        x, delta = split_delta(update)
        if delta is None and split_delta(residual)[1] is not None:
            residual, (x, delta) = update, split_delta(residual)
        with graph.inserting_before(total):
            new = insert_call(graph, add_rms_norm, (x, residual, delta, weight, eps), like=norm)
            picked = insert_picks(graph, new, (0, 1), like=norm)
        norm.replace_all_uses_with(picked[0])
        total.replace_all_uses_with(picked[1], delete_user_cb=lambda user, new=new: user is not new)
        report.matches += 1
    return report
