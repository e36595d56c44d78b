"""Which tokens of which sequences the next step computes, and the plan sent to the worker. No tensor, no device.

scheduler        continuous batching: schedule, commit, abort
batch_builder    number of tokens of each sequence in the next step; preemption
drafting         number of drafts in a step with speculation="auto"
speculation      drafts of one sequence and their acceptance rate
states           waiting, running, held and finished sequences
sequence         state of one sequence
rows             tables of the running sequences, and step plans built from them
masks            token masks of constrained sequences in issued steps
logit_edits      biases, bans and penalties of a step
prompt_scores    rows of logits for prompt log-probabilities
forbidden        tokens that would complete a bad word
limits           configuration and statistics of the scheduler
kv_pages         free, shared and cached KV pages
answer_history   recent answers by adapter, as a source of drafts
prefix_cache     keys of shared prompt prefixes
waiting          order of admission
suspects         sequences that may have caused a failed step
residency        adapters that should be on the device
adapter_slots    adapter slots and their eviction
step_plan        what one step computes, and its results
step_codec       both as flat bytes
runner_protocol  interface of an object that executes plans
step_times       time of programs and of whole steps
"""
