"""Processes that are started, and watched while they run.

child       a process and the line to it
last_words  what it says before it ends
watch       who beats, and which step takes too long
"""
