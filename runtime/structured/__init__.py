"""Answers that fit a schema, a regular expression or a grammar, by llguidance (extra `structured`).

vocabulary    the model's tokens as llguidance sees them
trial         constraints are tried in a child process first, with limits on time and memory (trial_worker)
plain         schemas that cannot be hopeless, and need no trial
compiler      StructuredOutputsParams -> Grammar, bounded
matcher       which tokens may follow, for one completion; packed masks for many
drafted       the masks of a step with drafts
"""
