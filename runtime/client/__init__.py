"""Speaks with a server.

client           `Client`, for blocking code
async_client     `AsyncClient`, for asyncio
connection       greeting, heartbeats, what is open
link             the socket on an asyncio loop
requests         what is asked, and chunks put together
"""
