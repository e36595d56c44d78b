"""One process per tensor-parallel rank of a model. Rank 0 has the requests; its peers run the same steps.

parallel_model  the model on rank 0, which sends each call to its peers; sleep mode on all ranks
peers           start, command and watch the other ranks from rank 0
rank_process    the process of another rank: receives step plans and executes them
plan_ring       ring buffer of step plans in shared memory
peer_messages   settings and orders that rank 0 sends to its peers
process_group   join torch.distributed's process group
"""
