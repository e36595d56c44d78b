"""Clients of a server.

client           `Client`, for blocking code
async_client     `AsyncClient`, for asyncio
connection       greeting, heartbeats, open requests and calls
link             the socket on an asyncio loop
requests         requests as messages, and chunks as outputs
lora_requests    load the adapters of vLLM's LoRARequest on the server
"""
