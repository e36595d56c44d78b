"""A trained draft of tokens: an EAGLE-3 chain head, a single layer that reads three of the target's hidden states.

config    its config.json, and whether it fits a target
eagle     the head as a plain module over the paged cache, with the parameter names of published heads
steps     what an engine runs of it: a first pass over a step's rows, and a row of the chain
weights   its .safetensors file, checked before it is read

An adapter may have a LoRA of its own for the head, in its subdirectory `draft`. `load_adapter` and `slot_tensors` read
it as they read every adapter, given an `EagleConfig`.
"""
