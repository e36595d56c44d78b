"""Speaks with a server.

client           `Client`, for blocking code
async_client     `AsyncClient`, for asyncio
connection       greeting, heartbeats, what is open
link             the socket on an asyncio loop
lora_requests    adapters as vLLM's users name them, loaded where the server has them not
requests         what is asked, and chunks put together
"""
