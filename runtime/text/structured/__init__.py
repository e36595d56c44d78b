"""Structured outputs: token masks from a schema, a regular expression or a grammar, by llguidance (extra `structured`).

vocabulary         the model's tokens for llguidance
trial              compiles untrusted constraints in a child process first, with limits
trial_process      that child process
grammar_compiler   StructuredOutputsParams -> Grammar
matcher            state of one completion, and its allowed next tokens
mask_filling       packed masks of many completions, filled by threads
draft_masks        masks of a step with drafts
"""
