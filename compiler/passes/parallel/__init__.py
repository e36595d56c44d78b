"""Passes for tensor parallelism.

shard                 split the model over ranks
fuse_all_reduce_norm  fuse the sum of the ranks' partial results into the norm after it
"""
