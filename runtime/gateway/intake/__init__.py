"""Work for a request before it is admitted, shared fairly between owners.

fair_queue    turns by owner, for decoding, rendering and tokenizing
body_memory   limits the bytes of request bodies that an owner occupies
refusal_pace  spaces the refusals of an owner
"""
