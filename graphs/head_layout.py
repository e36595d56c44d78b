"""Heads of a checkpoint in the graph's layout: zero-padded to the kernels' head dimension, rotated as a whole.

Phi-3 mini's heads of 96 dimensions become heads of 128. Zeros in q and k add nothing to a score, and zeros in v meet
zero columns in o. RoPE pairs dimension i of a head's first half with dimension i of the second. So rotated dimensions
begin each half, and the others (Phi-4-mini's last 32) follow in both halves, where the frequencies are zero.
"""

import torch

from .config import LlamaConfig

ROWS = ("q_proj", "k_proj", "v_proj")


def heads_axis(module: str, kind: str) -> int | None:
    """Return the axis of a projection's tensor that holds heads, or None.

    kind: "weight" [N, K], "bias" [N], "weight_scale" [N, 1], "lora_a" [r, K] or "lora_b" [N, r].
    """
    name = module.rpartition(".")[2]
    if name in ROWS:
        return None if kind == "lora_a" else 0
    return 1 if name == "o_proj" and kind in ("weight", "lora_a") else None


def arranged_shape(config: LlamaConfig, module: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape after `arranged`; unchanged if it does not fit the config."""
    axis = heads_axis(module, kind)
    if axis is None or axis >= len(shape) or shape[axis] % config.stored_head_dim:
        return shape
    return (*shape[:axis], shape[axis] // config.stored_head_dim * config.head_dim, *shape[axis + 1 :])


def arranged(config: LlamaConfig, module: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a stored tensor with the heads of the graph; the tensor itself if they are equal.

    RoPE's `attention_factor` is in the softmax scale, which applies to all dimensions. So q's unrotated dimensions are
    divided by it; the result is then in fp32.
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
    """Divide by the factor; eight-bit values stay, since their scales have it."""
    if not _has_factor(config, module) or unturned.element_size() == 1:
        return unturned
    return unturned / config.rope_scaling.attention_factor**2


def _has_factor(config: LlamaConfig, module: str) -> bool:
    partial = config.rotary_dim < config.stored_head_dim
    return partial and config.rope_scaling.attention_factor != 1.0 and module.endswith("q_proj")
