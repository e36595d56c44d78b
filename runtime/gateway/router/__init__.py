"""Routes requests to one or several engines, and moves streams to another engine when theirs dies.

router             `Router` implements `Engines`
dispatch           waits for an engine if none can accept a request now
stream_migration   a stream that continues in another engine
engine_link        connection to one engine, and polling of its state
load_balancer      decides which engine gets a request; pure bookkeeping
least_loaded       heap of the least loaded engines, and random subsets
prefill            lets prefill engines compute prompts that decode engines answer
prefix_index       engines that have seen a prompt's prefix
adapter_changes    loads and unloads adapters on all engines
adapter_updates    updates adapters on all engines from the body of a request
adapter_catalogue  last changes of adapters of all engines; adapters that are loaded on demand
adapter_root       folder or URL with adapters
adapter_folder     loads, replaces and unloads adapters as the folders of a directory change
"""
