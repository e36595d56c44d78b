"""Continuous batching: plans the next step, without a tensor or a device, and commits its results.

scheduler        plan steps, commit results, abort sequences
batch_builder    choose sequences and their numbers of tokens for the next step; chunk prompts, admit sequences
preemption       preempt running sequences for pages, adapter slots, priorities and owners
sequence_states  resources of waiting, running and held sequences
sequence         state of one sequence
waiting_queue    order of admission: priorities, fair shares
adapter_slots    loading and LRU eviction of adapters on the device
kv_cache         allocation of KV pages, prefix cache
host_pages       KV pages in host memory, the second tier of the prefix cache
disk/            KV pages in files, the third tier
speculation      number of drafts per step, acceptance rates, step times
answer_history   recent answers by adapter, a source of drafts
failed_steps     recovery from a failed step, search for the faulty sequence
logit_edits      biases, bad words, penalties of a step
token_masks      grammar masks of a step
prompt_logprobs  rows and results of prompt log-probabilities
plan_builder     arrays of a step plan from tables of running sequences
cascade/         order of a decode step's sequences by common prefix pages, for cascade attention
step_plan        step plan, masks, drafts and result; interface of runners
step_codec       these as bytes
transfer         KV pages that a prefill engine computes and a decode engine reads
limits           configuration and statistics of the scheduler
"""
