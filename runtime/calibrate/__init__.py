"""How a model is calibrated: by `sidestream calibrate`, and by an engine that starts with it for the first time.

inputs              a batch of texts for a plain Llama
figures             what a quantized KV cache would do to a model's keys and values, and how large its channels are
kv_error            the simulation of a cache for one layer
reader              texts through an engine's own program, step by step
rounding            weights rounded by what their linears read; error_compensation has the arithmetic
error_compensation  a weight rounded so that its products change least
texts, defaults     what is read where nobody names a text, how much of it, and what is rounded for
first_start         calibrates by itself what takes less than a minute, and keeps the result
"""
