"""KV pages in memory that engines on one host share: prefill engines write them, decode engines read them.

shared_memory  layout of the memory: a fingerprint, an entry for each page, the pages
page_writer    saves pages to it
page_reader    loads pages from it, and notices pages that were overwritten meanwhile
"""
