"""Speculative decoding on the device: drafts, and their acceptance around a program.

token_history       tokens of running sequences on the device, and n-gram drafts from them
trained_draft       compile and run a trained draft (EAGLE head)
spec_decode_graphs  place, sample and accept drafts around a program, as CUDA graphs
"""
