"""Bodies of requests and answers, as structs: what they hold is what is checked, and what the OpenAPI document says.

common        names, numbers and lists with their limits
sampling      the fields that say how tokens are drawn, as `SamplingParams`
completions   /v1/completions
chat          /v1/chat/completions
responses     /v1/responses
logprobs      log-probabilities as both families spell them
models        /v1/models, and adapters that come and go
tokens        /tokenize and /detokenize
status        /health, /ready, /version
errors        what an error looks like
openapi       the OpenAPI document
"""
