"""Cascade attention: decode steps whose sequences share prefix pages.

shared_prefixes  order of a step's sequences by common prefix pages, and whether the step uses cascade attention
"""
