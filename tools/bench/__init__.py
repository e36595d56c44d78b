"""`sidestream bench`: speed of the engine, of a server, and of kernels.

latency                       milliseconds per decode step (workload A)
throughput                    whole requests (workloads B and P)
startup                       cold and warm start (workload T)
kernels, kernels_attention    each op alone (workload K)
serving/                      a running server under load
engine_run                    step times of an engine, of this one or of vLLM in a process of its own
ablation                      `bench latency --ablate`: one optimisation off at a time
layer                         time of one decode layer, and of launches on the GPU
profile_run                   `bench latency --profile`: a trace of some steps
injected_drafts               `bench latency --speculate`: drafts of a given acceptance rate
floors                        the lower bound that memory bandwidth sets
random_model                  models, adapters and inputs with random values
"""
