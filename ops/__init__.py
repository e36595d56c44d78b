"""Level 1: one file per op, each with its schema, fake, reference (the specification), kernel and launch.

all_ops          registers every op as `torch.ops.sidestream.<name>`
core             shared by all ops: registry, KV layout, dtypes, workspaces, Triton helpers
attention        paged attention, and every op that reads or writes the KV cache
linear           8-bit linears, their kernels, and the tables that choose among them
lora             LoRA of mixed adapters: plan, shrink, expand
moe              mixtures of experts: routing, linears of chosen experts, LoRA on them, weighted sums
elementwise      one row at a time: norms, SiLU * mul, quantizers, embedding, sampling
spec_decode      drafts: copy them from past tokens, write them to a step's inputs, accept them
decoder_block    a decode layer between two attentions as one launch
collectives      collectives of a tensor-parallel group

Importing this package imports nothing: processes that only count pages (`core/kv_layout.py`) start without torch.
"""
