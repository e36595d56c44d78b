"""What happens at each endpoint. Each family's file has `routes(desk)`.

desk          what all handlers share: engines, admission, observer; who asks, and for which model
bodies        a request's body: bounded, in time, decoded
malformed     what is wrong with a body: the field, its value, what it may be
errors        whatever goes wrong, as OpenAI spells it
answering     one request for tokens from admission to its usage record
spoken        an answer's text as a chat's message: what is said, and which functions are called
event_stream  an answer as a stream of events
sse           how an event is spelled
completions   /v1/completions
echo          prompts that their answers begin with
chat          /v1/chat/completions, and conversations as prompts
responses     /v1/responses
models        /v1/models, adapters that come and go
tokens        /tokenize, /detokenize
status        /health, /ready, /version, /metrics
pages         /docs, /openapi.json, /
"""
