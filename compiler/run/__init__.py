"""A Program on a device.

bound_program       a program bound to tensors: run step by step, or captured as a CUDA graph
cuda_graph          CUDA graph capture, and the launches that must run once before it
collectives         order of collectives on all ranks; partial sums in memory that peers read
kernel_compilation  compilation of kernels on threads before their first launch; detection of compilations in a step
compile_once        compilation of each kernel by one of the processes that share Triton's cache
profiler_ranges     names of steps for a profiler
"""
