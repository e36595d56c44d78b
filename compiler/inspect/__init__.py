"""What people read about a compilation. Nothing below imports it.

explain          where a program's time goes, what an option would change
ledger           what each pass changes about the logits
difference       what changed between two dumps
dump             everything about a compilation as files
svg              the schedule as a picture
chrome_trace     the schedule for Perfetto
profile          a profiler's trace back to a program's steps (profile_trace: as lanes)
page/            index.html of a dump
"""
