"""Register every op as `torch.ops.sidestream.<name>` on import."""

from . import (  # noqa: F401
    attention,
    collectives,
    decoder_block,
    linear,
    lora,
    moe,
)
