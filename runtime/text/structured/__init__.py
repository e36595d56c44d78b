"""Answers that fit a schema, a regular expression or a grammar, by llguidance (extra `structured`).

vocabulary    the model's tokens as llguidance sees them
trial         constraints are tried in a child process first, with limits on time and memory (trial_worker)
plain         schemas that cannot be hopeless, and need no trial
compiler      StructuredOutputsParams -> Grammar, bounded
matcher       which tokens may follow, for one completion
filling       the packed masks of many completions, filled by other threads while the caller goes on
drafted       the masks of a step with drafts
"""
