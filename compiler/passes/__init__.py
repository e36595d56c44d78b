"""The graph passes, one per file, in six folders. `compiler/pipeline.py` lists them in order.

base        arguments and results of passes, and their common loop
lift        ATen idioms -> semantic ops; constant factors move into weights
quantize    eight-bit weights, activations and KV cache; accuracy of the quantized model
fuse        several ops -> one
lora        LoRA branches: quantized, fused, lowered to the side stream
experts     mixtures of experts
parallel    tensor parallelism

A pass is `def name(graph, context) -> PassReport`. It rewrites the graph in place and returns the number of matches and
the reason for each refusal.
"""

from .base import Context, PassReport

__all__ = ["Context", "PassReport"]
