"""Options that several commands share.

engine          a model, its adapters and its compilation
client          a server's address, and sampling
gateway         HTTP: address, keys and logs
launcher_flags  flags of the launchers of vLLM, SGLang and LoRAX
config_file     `--config file.toml`
models          models, adapters, buckets and batches to measure or compare
shapes          config.json of other families, for --shape
sizing          memory and step times of a model by its config
environment     versions and hardware
"""
