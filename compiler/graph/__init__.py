"""FX graphs: capture, query and rewrite.

capture          a module as one graph of ATen ops
repeated_layers  a model of many equal layers: two of each kind are traced, and copied
nodes            queries and edits of nodes
projections      a linear with its bias and LoRA branch; weights that produce or read a value's channels
layer_names      the layer in the name of a module, tensor or KV cache
matcher          patterns over nodes, with the reason of a near-miss
recipe           recipes: expressions over a checkpoint's tensors, and their slices for tensor parallelism
materialize      evaluate recipes: slice, pack and quantize weights
"""
