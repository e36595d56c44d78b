"""Importing this module registers every op as `torch.ops.sidestream.<name>`."""

from . import (  # noqa: F401
    attention,
    collectives,
    decoder_block,
    linear,
    lora,
)
