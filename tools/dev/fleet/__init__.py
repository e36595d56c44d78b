"""Faults of a fleet on Ray Serve: `chaos` kills replicas while clients check every answer."""
