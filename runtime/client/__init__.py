"""Clients of a server.

client           `Client`, for blocking code
async_client     `AsyncClient`, for asyncio
connection       greeting, heartbeats, open requests and calls
link             the socket on an asyncio loop
requests         requests as messages, and chunks as outputs
update           write an adapter's update into memory that server and client share
lora_requests    load the adapters of vLLM's LoRARequest on the server
"""
