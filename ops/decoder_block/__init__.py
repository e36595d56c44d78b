"""A decode layer between two attentions as one launch.

decoder_block    the op: o -> gate_up -> down -> the next q/k/v
kernel           the persistent kernel
epilogues        its products, exchanges of partial sums, and epilogues of norm and quantization
producers        its two warps that load weights and activations
"""

from . import decoder_block
