"""Adapters: disk -> host memory -> a slot on the GPU.

registry           names, numbers, content hashes and directories of adapters
adapter_sums       numbers of adapters and of their weighted sums
describer          parse configs and headers of adapters in a child process (describer_process)
lora_requests      vLLM's LoRARequests -> adapter names
remote_adapter     copy adapters from addresses that fsspec reads
adapter_limits     number of slots, LoRA rank and target projections of an engine
base_weights       the base's weights, on which parts of adapters depend (DoRA, trained biases)
weighted_sum       the weighted sum of adapters as one adapter
packing            an adapter's tensors -> the layout of its slot, on the GPU or on threads
host_store         cache of packed adapters in host memory
host_memory        page-locked blocks of host memory
slot_audit         compare slots with their adapters in host memory, one a minute
slot_loader        load adapters into GPU slots while steps run
disk_cache         cache of packed adapters on disk
file_stamps        whether adapters' files have changed
background_jobs    run jobs of low priority on one background thread
"""
