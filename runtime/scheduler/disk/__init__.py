"""KV pages on disk, the third tier of the prefix cache, as the scheduler sees it. `runtime.worker.disk` has the files.

disk_pages  which pages have files, and the orders to write and read them
"""
