"""The loop, and its options.

engine           scheduler -> runner -> text
completion       one completion as it grows: text, stop strings, log-probabilities
beam_search      one token at a time for every beam
options          the options of `LLM`, checked before any work
keywords         the same as type checkers see them
vllm_keywords    those of vLLM's `LLM`, and flags of its server, that there are not here
spelling         options in error messages as Python's keywords or as flags
resolve          what they come to for a given model and device
calibration      what `sidestream calibrate` measured, as a file
rounding         the weights that it has rounded, as a file
files            what both are called next to a model's weights
"""
