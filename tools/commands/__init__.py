"""One file for each command of `sidestream`.

demo                         the whole pipeline on the demo model
generate                     answer prompts, in this process or on a server
serve, gateway               a model's server; HTTP for running engines
fleet                        a fleet of engines on Ray Serve
chat, run_batch              clients of a server
keys, usage                  keys of gateways and engines; a gateway's usage log
replay                       the answer of a receipt, computed again
dump, diff, explain, ledger  `sidestream inspect`: compiled programs and passes
plan                         memory, speed and cost of a model on a GPU
calibrate, eval              quantization of a model, and its distance from bf16
collect_env                  versions and hardware for a bug report
measured_steps               step times and kernel resources for a dump
"""
