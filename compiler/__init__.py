"""From a module to programs that run: the front doors, and the one ordered list of passes.

api              `sidestream.compile`: a module in, a CompiledModel out
backend          `torch.compile(model, backend="sidestream")`, in front of the same pipeline
options          what a user may ask of the compiler
pipeline         which passes run, in which order, and the driver that runs them
accounting       how often each pass must match, told from the model's shape
build            one program: specialize, static passes, lower, schedule, plan memory
records          what is kept of each pass: a graph as text, op counts, refusals

graph/           FX graphs: how they are made, read and changed
passes/          the passes, one idea a file
program/         from a graph and a bucket to a Program
run/             a Program on a device
cost/            what a step should take
inspect/         what people read; nothing below imports it
"""
