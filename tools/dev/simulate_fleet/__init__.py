"""`python -m sidestream.tools.dev.simulate_fleet`: the gateway's real router before simulated engines.

policies   the router, and what it is held against: round robin, power of two choices
engines    engines that batch, load adapters and queue, without computing anything
steps      what a step takes, from the cost model
"""
