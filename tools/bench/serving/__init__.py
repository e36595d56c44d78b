"""Speed of a server.

serve          `bench serve`: traffic to a running server (workloads S and C)
traffic        arrivals, lengths and adapters of the requests
load           send them, and record the answers
cold           cold starts of adapters (workload C)
report         figures and tables of records; figures of the engine's counters
gateway        `bench gateway`: the cost of the HTTP front
bare_app       a bare application to compare it with
simulated_gpu  a GPU process that only takes time
http           `bench http`: HTTP compared with ZeroMQ for clients
closed_loop    its clients, one process of them
traced_gpu     `serve --trace-steps`: a GPU process that measures idle time between steps (workload G)
"""
