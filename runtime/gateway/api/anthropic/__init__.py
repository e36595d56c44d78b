"""Anthropic's Messages: a body becomes that of a chat, and the chat's answer becomes content blocks.

messages        /v1/messages and /v1/messages/count_tokens: bodies, and their conversion to a chat
message_events  the answer, whole and as events of a stream
"""
