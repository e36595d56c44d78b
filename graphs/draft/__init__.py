"""Trained drafts: an EAGLE-3 chain head, a single layer that reads three hidden states of the target.

config    its config.json, and whether it fits a target
eagle     the head as a plain module over the paged cache, with the parameter names of published heads
steps     programs of an engine: the first pass over a step's rows, and a row of the chain
weights   its .safetensors file, validated before the tensors are read

An adapter may have its own LoRA for the head, in its subdirectory `draft`; `load_adapter` and `slot_tensors` read it
with an `EagleConfig`.
"""
