"""`sidestream tune`: how each linear runs fastest on this GPU.

tune             the command
jobs             an entry of the table, and a configuration's time
table            a GPU's table file: what it has, setting an entry, writing it
bench            one linear's configurations, checked and timed
layers           the best few, timed in whole decode layers
"""
