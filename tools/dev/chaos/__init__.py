"""`python -m sidestream.tools.dev.chaos --minutes N`: attacks a live server while healthy clients check every answer.

__main__         the command: a server, healthy clients, rounds of attacks until a deadline, one table at the end
questions        the served model, and questions whose answers are known before the attacks
served           the server under attack: its processes, what they hold, and what is left after them
served_gateway   a gateway process in front of such servers
healthy          clients that ask the questions all along
http_clients     the same over HTTP, behind a gateway
attacks          the ordered list of attacks; SIGKILL and SIGSTOP of processes; damage of the cache's files
frames           frames that no honest program sends
peers            raw sockets: half messages, forged routing ids, endless parts; clients that are greedy or frozen
directories      adapter directories that hold traps
lives            what each process holds as it grows older
starts           how long each start took, and what it holds on its device
adapter_storm    a command of its own: adapters replaced all the time through two HTTP gateways
adapter_changes  which versions may answer while changes overlap
soak             a command of its own: memory of a gateway and two engines under steady traffic, without attacks
"""
