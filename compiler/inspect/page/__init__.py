"""`index.html` of a dump: one self-contained page over passes, graphs, schedule, memory and kernels.

data.py     records and programs as plain JSON values, equal graph lines shared
kernels.py  the source text of each op: reference, launch, Triton and Gluon functions
render.py   puts the data, page.css and the scripts into page.html
*.js        base.js and tabs.js first, then one script a tab
"""
