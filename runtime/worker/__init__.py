"""Owns tensors and CUDA graphs.

runner           executes plans: a bucket's program, filled and replayed
handle           a step on its way, and what comes back of it
inputs           arrays of a step on their way to the device, and back
sampler          from logits to tokens
sharded_sampler  the same where each rank has a part of the vocabulary
histories        the tokens of the sequences that run, and where their drafts come from
followed         what surrounds a program whose sequences have histories, as CUDA graphs
trained_draft    a trained draft: its pass over a step's rows, and the chain that drafts for the next
draft_parts      from a head's directory to what that runs
programs         the programs that are ready, and who waits for others
step_times       what programs take, measured or estimated at a start
buckets          which sizes have a program
model            from a directory to a model that runs: `load_model`
weights          a program's weights from a checkpoint
progress         what a start is busy with, on stderr
threads          how many threads the reference ops take on a CPU
sleep            memory that goes to others while the engine sleeps
regions          tensors in memory that can be given back
cuda_pages       a GPU's addresses whose memory comes and goes
capacity         does it fit, and how many KV pages the rest holds
"""
