"""From a graph and a bucket to a Program.

program          Program and Step: plain data, saved as JSON
buffers          memory with a name, and tensors inside it
calls            from an op's name to what can be called
sizes            what each dimension means, and a bucket's sizes
layers           which decoder layer a node or step belongs to
specialize       a graph at one bucket's sizes
lower            views fold away, every result gets a buffer
collectives      what ranks that share a model must agree on
schedule         two streams: waits, and shares of the SMs
memory           where temporaries lie in the arena
cache            programs kept on disk between runs
cache_folder     files of a bounded size together, each with its digest
"""
