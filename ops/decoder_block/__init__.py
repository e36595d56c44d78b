"""A decode layer between two attentions as one launch.

decoder_block    the op: o -> gate_up -> down -> the next q/k/v
kernel           the persistent kernel
pieces           its products, exchanges of partial sums, and epilogues
streams          the two warps that bring weights and activations
"""

from . import decoder_block
