"""`sidestream bench`, and what else measures speed.

latency, throughput, startup        the engine: workloads A, B and P, T
versus_vllm, engine_run             workloads A and P on vLLM and here, in turn
kernels, kernels_attention          each op alone: workload K
cold_adapters                       workload C in this process
layer, ablation                     one decode layer; what each optimisation is worth
cost_error, floors                  the cost model and the bandwidth's floor, next to what is measured
estimated_changes                   what the cost model says of each arm of the ablation
profile_run                         a trace of an engine at work
scheduler, structured               what planning costs on the CPU, and what constraints cost there
model_directory, random_model       models of random weights to measure with
gpu_time                            how long launches take
parallel/                           several GPUs: what ranks do together
drafts/                             speculation: drafts of a chosen acceptance, and what real drafts bring
serving/                            a running server under load
"""
