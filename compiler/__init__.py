"""Compile a module into programs: ordered graph passes, static launches, CUDA graphs.

api               `sidestream.compile`: a module in, a CompiledModel out
backend           `torch.compile(model, backend="sidestream")`
options           CompileOptions
pipeline          the ordered lists of passes, and the driver that runs them
expected_matches  number of matches that a model's shape implies for each pass
build_program     one program: specialize, static passes, lower, schedule, plan memory
pass_records      results of passes for people: graphs as text, op counts, refusals, tables

graph/            FX graphs: capture, match, rewrite; recipes of weights
passes/           the passes, one per file
program/          from a graph and a bucket to a Program
run/              a Program on a device
cost/             estimated time of a step
inspect/          dump, explain, diff, ledger, profile; no other folder imports it
"""
