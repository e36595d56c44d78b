"""/v1/chat/completions.

request   bodies, and their messages for chat templates
answer    responses, events of streams, and what makes them of generated text
endpoint  handlers and routes
"""
