"""Reports about a compilation, for people. Nothing below imports it.

explain          where a program's time goes, and what an option would change
ledger           numerics ledger: change of the logits by each pass
compare_dumps    differences of two dumps
dump             everything about a compilation as files
schedule_svg     the schedule as a picture
chrome_trace     the schedule for Perfetto: estimated, or from a profiler's trace
profile          map a profiler's trace to a program's steps
page/            index.html of a dump
"""
