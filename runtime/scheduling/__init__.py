"""Which tokens of which sequences the next step computes. Pure bookkeeping: no tensor, no device.

scheduler        continuous batching: schedule, commit, abort
choice           how many tokens of which sequences
drafting         how many drafts a step has with speculation="auto"
speculation      one sequence's drafts, and how likely they are to hold
states           waiting, running, held, finished
sequence         one sequence's state
rows             tables of the running sequences, and a step's plan gathered from them
masks            which tokens the constrained sequences of an issued step may get
logit_edits      what a step changes about single logits: biases, bans, penalties' history
prompt_scores    which rows of logits a prompt's log-probabilities need
forbidden        which tokens would complete a bad word
limits           what a scheduler is told of its engine, and tells about itself
pages            which KV pages are free, shared or known
rings            what adapters have answered last: which ring of tokens on the device is whose
prefix_cache     keys of prompts that begin alike
waiting          who is admitted next
suspects         what a failed step takes with it, and whose fault it was
residency        which adapters should be on the device
slots            which adapter sits in which slot
"""
