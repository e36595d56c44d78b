"""`index.html` of a dump: one self-contained page over passes, graphs, schedule, memory and kernels.

index_html.py      records and programs as JSON values, and the page with these, look.css, page.css and the scripts
kernel_sources.py  source text of each op: reference, launch, Triton and Gluon functions
*.js               dom.js, base.js and tabs.js first, then one script per tab

The gateway's console also uses look.css, dom.js and tabs.js, and reads them as files.
"""
