"""Work for a request before it is admitted, shared fairly between owners.

fair_queue     turns by owner, for decoding, rendering and tokenizing
body_memory    limits the bytes of request bodies that an owner occupies
body_decoder   decodes bodies, large ones first in a child process (body_worker)
body_errors    explains malformed bodies
update_body    checks the body of an adapter's update while it arrives
adapter_resolver  loads an adapter at its first request
refusal_pace   spaces the refusals of an owner
"""
