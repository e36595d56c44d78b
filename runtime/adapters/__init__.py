"""Adapters: disk -> host memory -> a slot on the device.

registry         names and files
describing       what an adapter's config and header say, read in a process of its own (describe_worker)
lora_requests    vLLM's LoRARequests as names
room             how many adapters an engine takes, of which rank, on which projections
store            adapters in host memory
host_memory      page-locked memory
stacks           their way into the device's stacks
packing          one adapter's tensors in its slot's layout
slot_copy        from host memory into a slot
slot_cache       packed adapters kept on disk, in a cache_folder of compiler/program
background       threads that load
"""
