"""What a step should take.

cost             estimated time of a program on both lanes
kinds            what is known of kernels by their kind, and what arguments add
launches         which of that applies to a step
work             bytes and multiply-adds of a step, from its shapes
hardware         what is known of a GPU
resources        registers and shared memory of a program's kernels
machine_code     a launch compiled without being run
timings          what was found out by running or compiling
"""
