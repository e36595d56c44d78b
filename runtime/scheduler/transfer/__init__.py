"""Directories of KV pages that a prefill engine computes and a decode engine reads.

leased_pages   host pages of a prefill engine, held until a decode engine has read them
offered_pages  pages of prefill engines that a decode engine loads
"""
