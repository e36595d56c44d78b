"""A decode layer between two attentions as one launch.

decoder_block    the op: o -> gate_up -> down -> the next q/k/v
kernel           the persistent kernel
epilogues        functions of the consumer warps: products, exchange of partial sums, norm and quantization
producers        functions of the two warps that load weights and activations
"""

from . import decoder_block
