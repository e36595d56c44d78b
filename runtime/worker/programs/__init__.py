"""Programs of the buckets: build them, compile their kernels, keep them bound to the model's tensors.

program_processes   processes that build programs and compile their kernels during a start
kernel_queue        queue of the kernels that these processes compile, each once
bound_programs      keep the programs of buckets, build them in the background, measure their times
"""
