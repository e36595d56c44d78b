"""Level 4: the `sidestream` command, and the development tools.

cli         parse the command line, run the command, print errors as one line
commands    one file a command
options     options that several commands share
bench       `sidestream bench`: speed
tuning      `sidestream tune`: the fastest kernels for a model's linears
eval        `sidestream eval`: the difference between quantized serving and bf16
demo_model  the embedded demo model and its adapters
dev         development tools, not in the wheel
"""
