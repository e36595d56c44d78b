"""Rotary position embedding: frequencies of each RoPE type, and the rotation in Hugging Face's form."""

import math

import torch

from .config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Return fp32 [D/2] on the CPU: radians per position of each pair of dimensions, zero for unrotated pairs."""
    width = config.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    found = _scaled(1.0 / config.rope_theta**exponents, config)
    return torch.nn.functional.pad(found, (0, (config.head_dim - width) // 2))


def _scaled(plain: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Scale the frequencies by the config's RoPE type.

    llama3: frequencies with wavelengths below original_context / high_freq_factor are unchanged, those above
    original_context / low_freq_factor are divided by `factor`, and those in between are interpolated.
    """
    scaling = config.rope_scaling
    if scaling.kind == "default":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        return plain / torch.tensor(scaling.factors, device="cpu")
    if scaling.kind == "yarn":
        share = _scaled_share(config)
        return plain / scaling.factor * share + plain * (1.0 - share)
    rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = ((rotations - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - blend) * plain / scaling.factor + blend * plain


def _scaled_share(config: LlamaConfig) -> torch.Tensor:
    """Return YaRN's scaled share of each frequency, fp32 [D/2]: 0 for high ones, 1 for low ones, a ramp in between."""
    scaling, width = config.rope_scaling, config.rotary_dim

    def pair_index(rotations: float) -> float:
        """Return the fractional index of the pair with this number of rotations within the original context."""
        wavelength = scaling.original_max_position_embeddings / rotations
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_index(scaling.high_freq_factor)), 0)
    last = min(math.ceil(pair_index(scaling.low_freq_factor)), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    return ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] with its halves (first, second) replaced by (-second, first)."""
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] rotated by cos and sin, fp32 [T, 1, D]; computed in fp32, in x's dtype."""
    wide = x.to(torch.float32)
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)
