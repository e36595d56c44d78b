"""Floor 3: runs programs for requests.

llm            `LLM`, in this process          prompts, sampling_params, outputs, errors   what goes in and out
engine         scheduler -> runner -> text     completion, detokenizer, tokenizer          tokens to text
scheduler      what the next step computes     request, waiting, rows, pages, prefix_cache, residency, adapter_slots,
               step_builder, step_failure, plan
adapters       names and files                 adapter_store (host memory), slot_cache (disk), adapter_stacks, slot_copy
               (the device's slots)
runner         the device side                 buckets, step_inputs, staging, sampler      padding, inputs, sampling
build          from a directory to a runner    loading, memory, adapters, engine_options   weights, capacity, LoRA
               stacks
serving        starts and watches two processes: batcher (connections, front_desk, open_requests, stepper, encoding) and
               gpu_process (served_llm), which speak over gpu_link (plan_wire); channel, serve_settings: the
               supervisor's line to them. protocol: what clients say and hear
client         speaks with a server            async_client, client_connection, client_link, client_requests, addresses,
               curve, chat_template
"""
