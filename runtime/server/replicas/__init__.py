"""Several engines of one model on one host.

host     starts them, and the HTTP front before them; starts again what ends
engine   one of them: a supervisor in a process of its own
"""
