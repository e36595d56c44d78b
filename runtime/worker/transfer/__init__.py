"""KV pages in host memory, which engines on one host may share: prefill engines write them, decode engines read them.

page_copier    copies pages to host memory and back while steps run
shared_memory  layout of the shared memory: a fingerprint, an entry for each page, the pages
page_writer    saves pages to it
page_reader    loads pages from it, and notices pages that were overwritten meanwhile
"""
