"""What the ranks of a tensor-parallel group do together.

group                          a rank and its peers, found by the name that an op is given
all_reduce                     the sum of every rank's partial result
all_reduce_add_rms_norm_quant  the same with what follows it: residual sum, norm, quantization
all_gather                     every rank's columns side by side
exchange                       memory that all ranks read over NVLink, and why no kernel there waits for ever
pieces                         what kernels are made of: tickets, signals, rows of peers
"""

from . import all_gather, all_reduce, all_reduce_add_rms_norm_quant
