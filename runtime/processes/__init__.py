"""Child processes, threads that end with the interpreter, and memory.

channel             messages between a supervisor and a process that it started
child               start and stop a process; keep the end of its stderr
garbage_collection  timing of garbage collection
helper_process      a process that answers one line at a time, with a time limit
logs                log records of all processes, as text or JSON
out_of_memory       recognise errors of a process that ran out of memory
threads             threads that are stopped when the interpreter exits
watchdog            heartbeats, and steps or processes that take too long
"""
