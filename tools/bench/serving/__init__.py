"""`sidestream bench serve`: a running server under load, and what is measured of servers otherwise.

serve            the command: workloads S and C
traffic          what is sent: arrivals, lengths, adapters
load             sends it, and watches
cold             what an adapter's cold start costs
first_traffic    first tokens and pauses of a server that has just started
report           records become figures and a table
batcher          what the batcher alone costs
gateway          the command: what the HTTP front costs
bare_app         what that compares with
http             the command: what clients get over HTTP, next to ZeroMQ
http_report      its figures and tables
closed_loop      its clients, one process of them
cores            cores for clients and others for the server
simulated_gpu    a GPU process that only takes its time
structured_steps  whether a device would wait for constraints in this process
structured_server what constraints cost a server's steps
traced_gpu       a GPU process that measures how long the device stands still (workload G)
"""
