"""FX graphs: capture, query and rewrite.

capture          a module as one graph of ATen ops
nodes            queries and edits of nodes
projections      a linear with its bias and LoRA branch; weights that produce or read a value's channels
matcher          patterns over nodes, with the reason of a near-miss
recipe           recipes: expressions over a checkpoint's tensors, and their slices for tensor parallelism
materialize      evaluate recipes: slice, pack and quantize weights
"""
