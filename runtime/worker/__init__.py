"""Load a model onto its device and execute step plans: tensors, CUDA graphs, sampling.

model               a loaded model: its adapters, its runner, what its numbers depend on
model_loader        load a model: adapters, compilation, memory plan, weights, programs
weight_loader       load a program's weights from a checkpoint by compiler.graph.materialize, or make random ones
memory_budget       memory demand of an engine, and the number of KV pages that fit
progress            start-up progress on stderr
cpu_threads         number of torch threads for a model on a CPU
model_runner        execute step plans: fill a bucket's inputs, replay its program, sample
buckets             choose the bucket, and so the program, of each step
decode_rows         steps with few prompt tokens as decode steps
cascade_attention   whether there are programs with cascade attention, and for which steps
programs/           programs of the buckets: built by processes, with their kernels, and kept
step_inputs         static input tensors of a bucket
staging             copy small arrays to the device in one transfer, and back
step_handle         a submitted step's results on their way to the host
sampler             logits -> tokens and log-probabilities
sharded_sampler     the same for vocabularies split over tensor-parallel ranks
speculation/        drafts, and their acceptance around a program
disk/               KV pages in files below host memory
sleep               sleep mode: release a model's memory and restore it
sleep_memory        memory that is restored at the same addresses
transfer/           copy KV pages to host memory and back, also to and from that of other engines
calibrate/          calibrate and round with the engine's own programs
tensor_parallel/    one process per tensor-parallel rank
"""
