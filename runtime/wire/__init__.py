"""The protocol between a server and its clients; docs/protocol.md specifies it.

protocol         messages, limits, and frames
addresses        where a server listens
keys             CURVE keys: who may speak with a server
"""
