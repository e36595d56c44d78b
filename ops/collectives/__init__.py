"""Collectives of a tensor-parallel group.

tensor_parallel_group          a process's rank and its peers, found by the name that an op uses
all_reduce                     the sum of all ranks' partial results
all_reduce_add_rms_norm_quant  all-reduce fused with residual sum, norm and quantization
all_gather                     the concatenated columns of all ranks
exchange                       memory that all ranks access over NVLink, with a proof that no kernel deadlocks
signals                        tickets, signals and rows of peers, for kernels
"""

from . import all_gather, all_reduce, all_reduce_add_rms_norm_quant
