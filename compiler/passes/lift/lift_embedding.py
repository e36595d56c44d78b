"""Token embedding -> `sidestream.embedding`."""

from torch import fx

from ....ops.elementwise.embedding import embedding
from ...graph.nodes import aten, bind, insert_call, is_call, shape_of
from ..base import Context, PassReport


def lift_embedding(graph: fx.Graph, context: Context) -> PassReport:
    """A look-up of rows by flattened token ids.

    before  embedding = aten.embedding.default(embed_tokens_weight, input_ids)
    after   embedding_1 = sidestream.embedding(input_ids, embed_tokens_weight)

    Matches ATen's embedding. Leaves look-ups by a matrix of ids (those stay ATen's; they are right, only not ours).
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, aten.embedding.default):
            continue
        weight, ids = bind(node).weight, bind(node).indices
        if len(shape_of(ids)) != 1:
            report.rejected.append(f"{node.name}: {ids.name} has {len(shape_of(ids))} dimensions, not one")
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(insert_call(graph, embedding, (ids, weight), like=node))
        report.matches += 1
    return report
