"""A Program on a device.

emit             bound to tensors: step by step, or captured as a CUDA graph
captured         what launches, recorded as one CUDA graph
first_runs       launches that must run once before a capture
places           parts of sums over the ranks, written where the peers read them
ahead            kernels compiled on several threads before their first launch
compilations     kernels that steps compile all the same: counted, or refused
ranges           names of steps for a profiler
"""
