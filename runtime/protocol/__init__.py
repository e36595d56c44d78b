"""The protocol between a server and its clients; docs/protocol.md specifies it.

protocol         messages and limits
framing          messages as frames, and what is refused as none
templates        chat templates in a welcome
zmtp             the transport below it, as the server speaks it with peers that need no keys
inflow           what peers with keys have sent of messages without an end
addresses        where a server listens
keys             CURVE keys: who may speak with a server
channel          the supervisor's line to its children
"""
