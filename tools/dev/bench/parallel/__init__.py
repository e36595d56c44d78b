"""Benches of several GPUs.

all_reduce  the sum over the ranks, alone and with the norm that follows
"""
