"""Floor 3: runs programs for requests.

llm            `LLM`, in this process          prompts, sampling_params, outputs, errors   what goes in and out
engine         scheduler -> runner -> text     completion, detokenizer, tokenizer          tokens to text
scheduler      what the next step computes     request, rows, pages, adapter_slots, plan   its bookkeeping, without tensors
runner         the device side                 buckets, step_inputs, staging, sampler      padding, inputs, sampling
build          from a directory to a runner    loading, memory, adapters, engine_options   weights, capacity, LoRA stacks
"""
