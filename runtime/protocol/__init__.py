"""The protocol between a server and its clients; docs/protocol.md specifies it.

adapter_map       adapters loaded and unloaded by clients: a last-writer-wins map, and its clock
messages          messages and limits
framing           encode and decode messages as frames; refuse malformed ones
chat_templates    chat templates in messages
zmtp              ZMTP, the transport below, as the server speaks it with clients that need no keys
partial_messages  limit the bytes of unfinished messages of clients with keys
addresses         where a server listens, and which addresses are safe
curve_keys        CURVE keys: which clients may connect
"""
