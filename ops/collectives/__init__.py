"""Collectives of a tensor-parallel group.

tensor_parallel_group          a process's rank and its peers, found by the name that an op uses
all_reduce                     the sum of every rank's partial result
all_reduce_add_rms_norm_quant  all-reduce fused with residual sum, norm and quantization
all_gather                     every rank's columns side by side
exchange                       memory that all ranks access over NVLink, and why no kernel deadlocks
signals                        tickets, signals and rows of peers, for kernels
"""

from . import all_gather, all_reduce, all_reduce_add_rms_norm_quant
