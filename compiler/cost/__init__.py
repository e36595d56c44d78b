"""Estimated time of a step.

estimate          time of a program on both lanes
kernel_costs      constants of each kind of kernel, and corrections by argument
bytes_and_flops   bytes and FLOPs of a step, from its shapes
hardware          bandwidth, rates and fixed costs of GPUs
kernel_resources  registers and shared memory of a program's kernels
machine_code      compiles a launch without running it
timings           measured times and compiled resources, as a file
"""
