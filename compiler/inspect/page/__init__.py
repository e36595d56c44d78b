"""`index.html` of a dump: one self-contained page over passes, graphs, schedule, memory and kernels.

data.py          records and programs as plain JSON values, equal graph lines shared
switched_off.py  which option leaves a pass without work
kernels.py       the source text of each op: reference, launch, Triton and Gluon functions
render.py        puts the data, look.css, page.css and the scripts into page.html
*.js             dom.js, base.js and tabs.js first, then one script a tab

look.css, dom.js and tabs.js are also the gateway's console's, which reads them as files.
"""
