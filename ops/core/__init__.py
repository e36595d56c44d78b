"""What every op needs; nothing in here knows an op.

registry        one name, a reference for the CPU, a launch for CUDA
kv_layout       where a token's keys and values lie in the paged cache
residual_stream  how the residual stream is held: in a bf16 model also as fp16 sixteenths
eight_bits      dtypes of quantized tensors, and how far their values reach
workspace       scratch memory that outlives a launch
reproducible    products, sums and exponentials of references, the same bits in every batch
device          how many SMs a launch may count on
triton_support  what makes a Triton kernel right on the GPU and in the interpreter
gluon_support   what Gluon is called in each release, and pieces of every Gluon kernel
"""
