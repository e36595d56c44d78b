"""Token embedding -> `sidestream.embedding`."""

from torch import fx

from ....ops.elementwise.embedding import embedding
from ...graph.nodes import aten, bind, calls, insert_call, shape_of
from ..base import Context, PassReport, Refused, rewrite_each


def lift_embedding(graph: fx.Graph, context: Context) -> PassReport:
    """Replace ATen's embedding of flattened token ids.

    before  embedding = aten.embedding.default(embed_tokens_weight, input_ids)
    after   embedding_1 = sidestream.embedding(input_ids, embed_tokens_weight)

    Leaves embeddings of a matrix of ids.
    """

    def lift(node: fx.Node) -> None:
        weight, ids = bind(node).weight, bind(node).indices
        if len(shape_of(ids)) != 1:
            raise Refused(f"{ids.name} has {len(shape_of(ids))} dimensions, not one")
        with graph.inserting_before(node):
            node.replace_all_uses_with(insert_call(graph, embedding, (ids, weight), like=node))

    return rewrite_each(calls(graph, aten.embedding.default), lift)
