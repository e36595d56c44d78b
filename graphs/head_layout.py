"""Heads of a checkpoint in the graph's layout: zero-padded to the kernels' head dimension, rotated as a whole.

Phi-3 mini's heads of 96 dimensions become heads of 128. Zeros in q and k add nothing to a score, and zeros in v are
multiplied by zero columns of o. RoPE pairs dimension i of a head's first half with dimension i of the second. So each
half starts with rotated dimensions; the others (Phi-4-mini's last 32) follow, and their frequencies are zero.
"""

import torch

from .config import LlamaConfig

ROWS = ("q_proj", "k_proj", "v_proj")


def heads_axis(module: str, kind: str) -> int | None:
    """Return the axis of the heads in a projection's tensor; None for a tensor without heads.

    kind: "weight" [N, K], "bias" or another vector [N], "weight_scale" [N, 1], "lora_a" [r, K] or "lora_b" [N, r];
    "ia3" and "ia3_biased" [N]: factors of outputs.
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
    """Return a stored tensor with the heads in the graph's layout; the tensor itself if the layouts are equal.

    The softmax scale includes the square of RoPE's `attention_factor`, and it applies to all dimensions. So q's
    unrotated dimensions are divided by that square, but not their factors; the result is then in fp32.
    """
    scaled = not kind.startswith("ia3") and _has_factor(config, module)
    shape, axis = tuple(tensor.shape), heads_axis(module, kind)
    if axis is None or not config.rearranges_heads or shape[axis] % config.stored_head_dim:
        return tensor
    if scaled and tensor.element_size() > 1:
        tensor = tensor.float()
    before, after = shape[:axis], shape[axis + 1 :]
    rotated, rest = config.rotary_dim // 2, (config.stored_head_dim - config.rotary_dim) // 2
    stored = tensor.reshape(*before, -1, config.stored_head_dim, *after)
    halves = tensor.new_zeros(*stored.shape[: axis + 1], 2, config.head_dim // 2, *after)
    first, second, *others = stored.split((rotated, rotated, rest, rest), axis + 1)
    for half, (begin, end) in enumerate(zip((first, second), others, strict=True)):
        target = halves.select(axis + 1, half)
        target.narrow(axis + 1, 0, rotated).copy_(begin)
        target.narrow(axis + 1, rotated, rest).copy_(_without_factor(config, end) if scaled else end)
    return halves.reshape(arranged_shape(config, module, kind, shape))


def _without_factor(config: LlamaConfig, unrotated: torch.Tensor) -> torch.Tensor:
    """Divide q's unrotated dimensions by the squared factor; of eight-bit weights, only the scales are divided."""
    return unrotated if unrotated.element_size() == 1 else unrotated / config.rope_scaling.attention_factor**2


def _has_factor(config: LlamaConfig, module: str) -> bool:
    partial = config.rotary_dim < config.stored_head_dim
    return partial and config.rope_scaling.attention_factor != 1.0 and module.endswith("q_proj")
