"""One file a command of `sidestream`.

demo, generate                  a model in this process
serve, complete, chat, keygen   a server and its clients (streaming: answers as they grow)
keys, usage                     a gateway's API keys, and who used what
dump, explain, diff, ledger     what the compiler did (measured_steps: a dump's measured side)
calibrate, eval                 how the KV cache is quantized, how close the answers are to bf16
collect_env                     what a bug report needs
"""
