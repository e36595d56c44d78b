"""One model over several processes, one a rank: rank 0 has the requests, the others do the same steps.

shared_model  a model whose ranks are processes of their own: what rank 0 runs, its peers run too
shared_sleep  all ranks give their memory back for a while
peers         the other ranks, as rank 0 sees them: started, told, watched
peer_process  the process of another rank
plan_ring     plans in memory that all ranks share
joining       how a process becomes a rank
settings      what a peer is told when it starts
"""
