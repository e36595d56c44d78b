"""Calibration results, as files, and the arithmetic behind them. Nothing in here runs an engine.

calibration         file of calibrated factors
rounded_weights     file of rounded weights
file_names          names of both next to a model's weights
figures             statistics of keys, values and channels from a plain Llama
inputs              a batch of texts for a plain Llama
kv_error            simulated error of a quantized KV cache for one layer
error_compensation  round a weight so that its products change least
texts, defaults     default calibration texts, their size, and what is rounded
"""
