"""Load and faults for a fleet on Ray Serve.

chaos         kill replicas while clients check every answer
http_clients  clients of the fleet's gateway
warm_start    start time of replicas
capacity      number of engines that a load needs
places        a directory for the sockets, the cache and the token of a script's Ray
"""
