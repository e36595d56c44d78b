"""HTTP endpoints: each file has the request and response bodies, the handler, and `routes(context)`.

chat                /v1/chat/completions (a folder)
completions         /v1/completions, with echo
responses           /v1/responses (a folder), also stored ones
anthropic           /v1/messages (a folder)
vllm                batches of chats, rendered prompts, scores of labels, tokens of texts (a folder)
models              /v1/models, and loading and unloading of adapters
score               /v1/score
health              /health, /ready, /version, /metrics, /pause, /resume, /is_paused, /get_world_size, /server_info
pages               /openapi.json with the OpenAPI document, /docs, / (the console)
context             what handlers share: engines, admission, observer; resolves `model`; applies chat templates
beam_search         beam search of completions and chats
completion_session  a request from admission through its chunks to its usage record
event_stream        responses as server-sent events
request_body        reads and decodes bodies; errors for malformed ones
errors              error responses, including that for unknown models
body_types          base classes and common field types of bodies
field_table         fields of other servers' bodies: values without an effect, remedies
sampling_fields     sampling parameters of a body
response_format     structured outputs of a body: `response_format`, `structured_outputs`
logprobs            log-probabilities in answers
tools               tools of a chat, and the grammar of tool calls
tool_call_parser    splits generated text into reasoning, content and tool calls
"""
