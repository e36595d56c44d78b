"""`python -m sidestream.tools.chaos --minutes N`: attacks a live server while healthy clients check every answer.

run           the command: a server, healthy clients, rounds of attacks, one table at the end
served        the server under attack: its processes, what they hold, and what is left after them
healthy       clients that ask the demo model's questions and know the answers
attacks       the ordered list of attacks
frames        frames that no honest program sends
peers         raw sockets: half messages, forged routing ids, endless parts; clients that are greedy or frozen
directories   adapter directories that hold traps
caches        files of the cache, damaged
kills         SIGKILL and SIGSTOP of each process
lives         what each process holds as it grows older
router_kills  a command of its own: kill -9 of engines behind the gateway's router, each answer held to its last token
report        what was seen, as one table
"""
