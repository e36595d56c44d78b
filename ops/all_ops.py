"""Importing this module registers every op as `torch.ops.sidestream.<name>`."""

from . import attention, collectives, decoder_block, linear, lora, rows, speculate  # noqa: F401
