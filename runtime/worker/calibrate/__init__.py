"""Calibration that runs the model: for `sidestream calibrate`, and at the first start of a model.

reader       run texts through the engine's own program, step by step
rounding     round weights by the inputs of their linears
first_start  calibrate at a first start when it takes less than a minute, and keep the result
"""
