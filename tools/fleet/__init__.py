"""The commands of a fleet on Ray Serve.

deploy         `sidestream deploy`
show           `sidestream fleet status`, and `sidestream fleet stop`
capacity       how many engines a load needs: `python -m sidestream.tools.dev.fleet.capacity`
chaos          kills replicas and nodes while clients stream: `python -m sidestream.tools.dev.fleet.chaos`
http_clients   those clients
warm_start     times a host's first engine and its second: `python -m sidestream.tools.dev.fleet.warm_start`
places         a directory for the sockets, the cache and the token of a script's Ray
"""
