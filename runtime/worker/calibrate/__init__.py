"""Calibration with the engine's own programs, for `sidestream calibrate` and at the first start of a model.

first_start  calibrate a model automatically at its first start, and cache the result
rounding     round weights given the inputs of their linears
scorer       run texts through an engine's program and return all tokens' logits
"""
