"""`sidestream tune`: the fastest kernel configuration of each linear on this GPU.

tune     the command
table    entries of a GPU's table file, and timed configurations
bench    check and time the configurations of one linear
grouped  the same for a linear of experts
layers   time the best few in whole decode layers
"""
