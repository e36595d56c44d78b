"""Passes for tensor parallelism.

shard                 split the model over ranks (`shard_parts`: one rank's part of each op)
fuse_all_reduce_norm  the norm after a row-parallel linear sums the partial results of the ranks
"""
