"""Reports about a compilation, for people. No other folder of the compiler imports it.

explain          breakdown of a program's estimated time, and the effect of options
ledger           numerics ledger: change of the logits by each pass
compare_dumps    differences of two dumps
dump             everything about a compilation as files
schedule_svg     the schedule as a picture
chrome_trace     the schedule for Perfetto: estimated, or from a profiler's trace
profile          map a profiler's trace to a program's steps
page/            index.html of a dump
"""
