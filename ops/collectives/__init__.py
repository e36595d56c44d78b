"""What the ranks of a tensor-parallel group do together.

group       a rank and its peers, found by the name that an op is given
all_reduce  the sum of every rank's partial result
all_gather  every rank's columns side by side
"""

from . import all_gather, all_reduce
