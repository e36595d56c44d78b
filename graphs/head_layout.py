"""Heads of a checkpoint in the layout of the graph: as wide as the attention kernels have them, and turned as a whole.

Phi-3 mini's heads of 96 dimensions become heads of 128, with zeros where the checkpoint has nothing: zeros in q and k
add nothing to a score, and zeros in v meet columns of zeros in o. RoPE turns dimension i of a head's first half with
dimension i of the second. So dimensions that are turned begin each half; those that are not (Phi-4-mini's last 32)
follow in both halves, where the frequencies are zero.
"""

import torch

from .config import LlamaConfig

ROWS = ("q_proj", "k_proj", "v_proj")


def heads_axis(module: str, kind: str) -> int | None:
    """Along which axis a tensor of a projection holds heads, None: it holds none.

    kind: "weight" [N, K], "bias" [N], "weight_scale" [N, 1], "lora_a" [r, K] or "lora_b" [N, r].
    """
    name = module.rpartition(".")[2]
    if name in ROWS:
        return None if kind == "lora_a" else 0
    return 1 if name == "o_proj" and kind in ("weight", "lora_a") else None


def arranged_shape(config: LlamaConfig, module: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that `arranged` gives a tensor of this shape; the same for one that does not fit the config."""
    axis = heads_axis(module, kind)
    if axis is None or axis >= len(shape) or shape[axis] % config.stored_head_dim:
        return shape
    return (*shape[:axis], shape[axis] // config.stored_head_dim * config.head_dim, *shape[axis + 1 :])


def arranged(config: LlamaConfig, module: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as stored -> with the heads of the graph: itself where these are the checkpoint's.

    RoPE's `attention_factor` is part of the softmax scale, which counts for all dimensions: q's that are not turned are
    divided by it, in fp32, in which such a tensor is returned.
    """
    shape, axis = tuple(tensor.shape), heads_axis(module, kind)
    if axis is None or not config.rearranges_heads or shape[axis] % config.stored_head_dim:
        return tensor
    if _has_factor(config, module) and tensor.element_size() > 1:
        tensor = tensor.float()
    before, after = shape[:axis], shape[axis + 1 :]
    turned, rest = config.rotary_dim // 2, (config.stored_head_dim - config.rotary_dim) // 2
    stored = tensor.reshape(*before, -1, config.stored_head_dim, *after)
    halves = tensor.new_zeros(*stored.shape[: axis + 1], 2, config.head_dim // 2, *after)
    first, second, *others = stored.split((turned, turned, rest, rest), axis + 1)
    for half, (begin, end) in enumerate(zip((first, second), others, strict=True)):
        place = halves.select(axis + 1, half)
        place.narrow(axis + 1, 0, turned).copy_(begin)
        place.narrow(axis + 1, turned, rest).copy_(_without_factor(config, module, end))
    return halves.reshape(arranged_shape(config, module, kind, shape))


def _without_factor(config: LlamaConfig, module: str, unturned: torch.Tensor) -> torch.Tensor:
    """Eight-bit values stay as they are: their scales have the factor."""
    if not _has_factor(config, module) or unturned.element_size() == 1:
        return unturned
    return unturned / config.rope_scaling.attention_factor**2


def _has_factor(config: LlamaConfig, module: str) -> bool:
    partial = config.rotary_dim < config.stored_head_dim
    return partial and config.rope_scaling.attention_factor != 1.0 and module.endswith("q_proj")
