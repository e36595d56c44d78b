"""Passes for tensor parallelism.

shard                 split the model over ranks
fuse_all_reduce_norm  the norm after a row-parallel linear sums the partial results of the ranks
"""
