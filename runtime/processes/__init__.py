"""Processes that are started, and watched while they run.

child       a process and the line to it
garbage     how often a process looks for garbage
last_words  what it says before it ends
memory      faults that mean that memory ran out
watch       who beats, and which step takes too long
"""
