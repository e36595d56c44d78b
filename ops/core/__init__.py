"""Code that all ops share; it imports no op.

registry           registration: one name, a reference for the CPU, a launch for CUDA
kv_layout          layout of keys and values in the paged cache
dtypes             quantized dtypes, and the residual stream in scaled fp16
device             SM count, and scratch memory that outlives a launch
cuda_driver        calls of the CUDA driver
ipc_memory         device memory that other processes map
reproducible_sums  products, sums and exponentials of references, with the same bits in every batch
triton_support     rounding, dots and PDL for Triton kernels, correct on the GPU and in the interpreter
gluon_support      Gluon's names in each Triton release, and helpers for Gluon kernels
"""
