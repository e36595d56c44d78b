"""Floor 1: one file an op, each with its schema, fake, reference (the specification), kernel and launch.

all_ops          registers every op as `torch.ops.sidestream.<name>`
core             what every op needs: registry, KV layout, workspace, Triton's spellings
attention        paged attention, and every op that reads or writes the KV cache
linear           linears in eight bits, their kernels, and the tables that choose among them
lora             LoRA of mixed adapters: plan, shrink, expand
rows             one row at a time: norms, SiLU * mul, quantizers, embedding, sampling
speculate        drafts: made from a sequence's own tokens, placed in a step's inputs, accepted
decoder_block    a decode layer between two attentions as one launch
collectives      what the ranks of a tensor-parallel group do together

Importing this package imports nothing: processes that only count pages (`core/kv_layout.py`) start without torch.
"""
