"""`sidestream tune`: the fastest kernel configuration of each linear on this GPU.

tune     the command
jobs     entries of the table, and timed configurations
table    read, change and write a GPU's table file
bench    check and time the configurations of one linear
layers   time the best few in whole decode layers
"""
