"""A server: three processes.

supervisor       starts the other two, watches them, stops them
batcher          the process between clients and GPU: its loop
state            what its parts know of the server as a whole
front_desk       what clients ask for, one message at a time
submissions      requests on their way into the engine
adapter_desk     adapters that clients load, unload and list
open_requests    requests that are not finished, and their chunks
listener         where clients connect
connections      the clients, and what has to go out to them
stepper          plans out, results in, adapters brought in
gpu_process      the process that drives the GPU
gpu_link         plans and results between those two
watch            who beats, and which step takes too long
settings         what `sidestream serve` is told
channel          the supervisor's line to its children
"""
