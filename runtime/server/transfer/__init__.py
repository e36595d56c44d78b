"""Prefill engines and decode engines of one server.

prefill_requests  requests whose KV pages a prefill engine holds, in its batcher
page_memory       memory for the pages, and the settings of each engine, in the supervisor
"""
