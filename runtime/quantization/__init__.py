"""Calibration and rounded weights: their files and arithmetic. Runs no engine.

calibration         file of calibration results, and the options that they set
rounded_weights     file of rounded weights
model_statistics    statistics of keys, values and channels from a plain Llama
kv_error            simulated error of a quantized KV cache
error_compensation  GPTQ-like rounding of one weight
texts               default calibration texts
defaults            file names and default sizes
"""
