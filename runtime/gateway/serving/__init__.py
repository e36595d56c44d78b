"""The application, and the process that serves it.

app           `build_app`: all routes, and the guard before them
guard         request ids, who asks, the last net for errors, the access log's lines
origins       which pages of other origins may call: CORS, and what they may not do without a key
open_door     admission where nothing is asked for: everyone, or everyone with the one key
bounds        what a connection may take: how many there are, how long each may be silent
joined_writes an answer's head leaves with its first bytes
direct_body   the middle of an answer, written without a task
turn          when the middles of answers are written
parts         engines, admission and observer as the settings ask for them
process       the process: uvicorn on a socket that listens
"""
