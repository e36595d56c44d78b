"""/v1/responses: a body becomes a chat, and the answer of the chat a response.

request    bodies, and their conversion to a chat
items      items of the input, and their conversion to messages
output     the response and the items of its output
builder    builds the output of an answer, with its events
store      stored responses
endpoint   handlers and routes
"""
