"""From a graph and a bucket to a Program.

program          Program and Step: plain data, saved as JSON
buffers          named memory, and tensors inside it
calls            from an op's name to its overload
sizes            meaning of each dimension, and a bucket's sizes
layers           decoder layer of a node or step
specialize       a graph at one bucket's sizes
lower            from nodes to operations on buffers, without views
schedule         two streams: waits, and shares of the SMs
memory           offsets of temporaries in the arena
cache            programs stored on disk between runs
cache_folder     a size-limited folder of files with digests
"""
