"""Importing this module registers every op as `torch.ops.sidestream.<name>`."""

from . import attention, decoder_block, linear, lora, rows  # noqa: F401
