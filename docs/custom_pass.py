"""A pass of your own, by name: the cosines and sines of the rotary embedding are computed on the side stream, while
the main stream computes the embedding and the first norm.
"""

import sys

import sidestream
from sidestream.compiler.graph.nodes import is_call
from sidestream.compiler.passes import Context, PassReport
from sidestream.compiler.pipeline import insert_pass
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.ops.attention.rope import rope_angles
from torch import fx


def angles_on_side(graph: fx.Graph, context: Context) -> PassReport:
    """Mark `sidestream.rope_angles` for the side stream; the scheduler places the fork and the join."""
    report = PassReport(0)
    for node in graph.nodes:
        if not is_call(node, rope_angles):
            continue
        if len(node.all_input_nodes) < 2:
            report.rejected.append(f"{node.name} is a constant: the side stream gains nothing")
            continue
        node.meta.update(stream="side", sm_share=0.25)
        report.matches += 1
    return report


config = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
passes = insert_pass(angles_on_side, after="lift_rope_angles", tier="lowers")
compiled = sidestream.compile(Llama(config, device="meta"), passes=passes)
decode = Bucket(tokens=8, sequences=8, pages=65, blocks=8, decode=True, lora=False)

print(compiled.explain([decode]))
print("dumped to", compiled.dump(sys.argv[1] if len(sys.argv) > 1 else "custom_pass_dump", [decode]))
