"""Commands for a fleet on Ray Serve.

deploy  `sidestream fleet deploy`
show    `sidestream fleet status` and `sidestream fleet stop`
"""
