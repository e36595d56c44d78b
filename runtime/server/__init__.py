"""A server: three processes, and a fourth where it answers HTTP.

supervisor       starts the others, watches them, stops them
replicas         several engines on one host, each started again alone
front            the HTTP front's process, where there is one
batcher          the process between clients and GPU: its loop
state            what its parts know of the server as a whole
front_desk       what clients ask for, one message at a time
submissions      requests on their way into the engine
adapter_desk     adapters that clients load, unload and list
grammar_desk     constraints on answers, compiled next to the batcher's loop
token_desk       texts that clients have tokenized
open_requests    requests that are not finished, and their chunks
retries          requests that go on after a step that did not return
listener         where clients connect
connections      the clients, and what has to go out to them
stepper          plans out, results in, adapters brought in
gpu_process      the process that drives the GPU
served           the model and the adapters that it serves
gpu_link         plans and results between those two
shared_masks     memory in which the one fills masks and the other reads them
settings         what `sidestream serve` is told
"""
