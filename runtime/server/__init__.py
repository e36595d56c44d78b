"""A server: supervisor, batcher and GPU process; optionally an HTTP gateway, and several engines on one host.

supervisor          starts, watches and restarts an engine's batcher and GPU process
supervisor_loop     the loop over child processes that both supervisors share, and the gateway's process
replica_supervisor  several engines on one host, each restarted alone
replica_process     entry point of one of them: a supervisor in its own process
batcher             the process between clients and GPU process: its loop
server_state        status of the server, and requests to resubmit after a restart of the GPU process
message_router      dispatches clients' messages; tokenizes texts for clients
submissions         checks, tokenizes and queues requests; compiles their grammars
adapter_requests    loads, unloads and lists adapters for clients
open_requests       unfinished requests and their chunks
listener            sockets that clients connect to
connections         connected clients, their heartbeats and output queues
stepper             submits steps ahead, receives results and loaded adapters
gpu_link            plans, masks and results between batcher and GPU process
shared_masks        shared memory for token masks
gpu_process         the process that drives the GPU
served_model        the model and adapters in the GPU process
transfer/           prefill engines and decode engines of one server
updates/            updates of adapters from clients' memory
saved_adapters      file with the adapters that clients have loaded
settings            settings that the processes share
"""
