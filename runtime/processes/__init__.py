"""Processes that are started, and watched while they run.

child   a process and the line to it
watch   who beats, and which step takes too long
"""
