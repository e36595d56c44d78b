"""Faults of a fleet on Ray Serve.

chaos         kill replicas while clients check every answer
http_clients  clients of the fleet's gateway
"""
