"""KV pages in files below host memory.

page_folder  one file a page: format, checks, and the bound of all files
page_files   threads that read and write pages of host memory
"""
