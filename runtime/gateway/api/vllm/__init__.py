"""Endpoints that only vLLM has.

batch    /v1/chat/completions/batch
render   /render below the endpoints that generate text
"""
