"""OpenAI-compatible HTTP gateway for one or several engines: a process of its own that speaks the public protocol.

addresses       loopback addresses, names in Host headers, networks of proxies
interfaces      protocols between the gateway's parts: engines, admission, observer
settings        settings of a gateway process
metrics         Prometheus metrics, access log, tracing spans
auth            API keys, rate limits, usage log
router          assigns requests to engines; migrates streams when an engine dies
console         the web page at /
intake          turns by owner, memory of bodies and pace of refusals, before a request is admitted
api             one file per endpoint, and what endpoints share: errors, request bodies, event streams
socket_writes   writes answers and streamed events to a client's socket, joined
connections     limits on the number and the idle time of connections
origin_policy   protection from pages of other origins: CORS, Host headers
middleware      authentication, request ids, error responses, access records
app             builds the ASGI application
server_process  runs the application in uvicorn
"""
