"""Passes on mixtures of experts. They run only on graphs with a router.

fuse_combine_norm  the weighted sum of a token's experts becomes part of the norm after it
lower_experts      linears of experts become a plan and grouped linears
"""
