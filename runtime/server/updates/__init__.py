"""Updates of adapters from clients' memory.

buffers   files in the socket's directory into which clients write updates
requests  updates and unloads of versions for clients
device_memory
          copies of updates in a GPU's memory
files     private copies of updates in the GPU process, also for the next one
"""
