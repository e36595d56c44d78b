"""Benches for developers: `python -m sidestream.tools.dev.bench.NAME`.

activated_lora     first token of a long cached prompt with an adapter as aLoRA and as LoRA
adapter_updates    updates of an adapter from a trainer's process, and other streams meanwhile
cost_error         the cost model compared with measured times
exact_answers      answers of `exact=True` that depend on how they were computed
first_traffic      first tokens after a cold start, and pauses under changing load
host_kv            first token of a long prompt from host memory, and decoding of others meanwhile
prompt_splits      attention of short chunks over long contexts, with several numbers of splits
refused_key        latencies of one key while another key's requests are refused
shared_prefix      decode attention of requests with the same prefix, read by each and read once
shared_prefix_steps  the same in whole decode steps, chosen by the scheduler
split_engines      gaps between tokens with prefill and decode engines, and with engines that do both
versus_vllm        workloads A and P on vLLM and on Sidestream, in turn
drafts/            acceptance and speed of real drafts
"""
