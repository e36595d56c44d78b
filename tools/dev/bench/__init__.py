"""Benches for developers: `python -m sidestream.tools.dev.bench.NAME`.

cold_adapters           first tokens of adapters that are not loaded
cost_error              the cost model compared with measured times
estimated_changes       the cost model's estimate for each arm of the ablation
scheduler, structured   CPU time of planning and of token masks
structured_server       a server with and without constraints
structured_steps        steps with constraints
first_traffic           first requests after a cold start
drafts/                 acceptance and speed of real drafts
parallel/               collectives over several GPUs
"""
