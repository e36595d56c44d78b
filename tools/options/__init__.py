"""Options that several commands share.

engine           of commands that build a model
client           of commands that speak with a server
config_file      `--config file.toml`
"""
