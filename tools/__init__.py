"""Floor 4: the `sidestream` command, and the development tools.

cli         parse the command line, run the command, print errors as one line
commands    one file a command
options     options that several commands share
bench       `sidestream bench`
tuning      `sidestream tune`
quality     `sidestream eval`: accuracy of quantized serving compared with bf16
fleet       commands for a fleet on Ray Serve
demo_model  the embedded demo model and its adapters
dev         development tools, not in the wheel
"""
