"""Endpoints that only vLLM has.

batch               /v1/chat/completions/batch
generative_scoring  /generative_scoring
invocations         /invocations
render              /render below the endpoints that generate text
tokenize            /tokenize, /detokenize, /tokenizer_info
"""
