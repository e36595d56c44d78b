"""Updates of adapters from clients' memory.

buffers   files in the socket's directory into which clients write updates
requests  updates and unloads of versions for clients
files     private copies of updates in the GPU process, also for the next one
"""
