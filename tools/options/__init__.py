"""What several commands share: options, models, and the machine's description.

engine           of commands that build a model
client           of commands that speak with a server
gateway          of commands that answer HTTP
vllm_flags       flags of `vllm serve` that are none here
config_file      `--config file.toml`
models           shapes, adapters, buckets and batches that are measured or compared
environment      versions and hardware
"""
