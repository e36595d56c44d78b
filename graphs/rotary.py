"""Rotary position embedding: frequencies of each RoPE type, and the rotation in Hugging Face's form."""

import math

import torch

from .config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """fp32 [D/2]: radians per position of each pair of dimensions, on the CPU; zero for unrotated pairs."""
    width = config.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    found = _stretched(1.0 / config.rope_theta**exponents, config)
    return torch.nn.functional.pad(found, (0, (config.head_dim - width) // 2))


def _stretched(plain: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Scale the frequencies by the config's RoPE type.

    llama3: wavelengths below original_context / high_freq_factor stay, above original_context / low_freq_factor are
    scaled by `factor`, and those in between are interpolated.
    """
    scaling = config.rope_scaling
    if scaling.kind == "default":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        return plain / torch.tensor(scaling.factors, device="cpu")
    if scaling.kind == "yarn":
        stretched = _ramp(config)
        return plain / scaling.factor * stretched + plain * (1.0 - stretched)
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # rotations within the original context
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - blend) * plain / scaling.factor + blend * plain


def _ramp(config: LlamaConfig) -> torch.Tensor:
    """Return YaRN's share of each frequency that is scaled: 0 for fast ones, 1 for slow ones."""
    scaling, width = config.rope_scaling, config.rotary_dim

    def pair_that_turns(times: float) -> float:
        """Which pair of dimensions turns so often within the original context; between two of them it has digits."""
        wavelength = scaling.original_max_position_embeddings / times
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_that_turns(scaling.high_freq_factor)), 0)
    last = min(math.ceil(pair_that_turns(scaling.low_freq_factor)), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    return ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [..., D]: (first half, second half) becomes (-second, first)."""
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin fp32 [T, 1, D] -> x's shape and dtype, computed in fp32."""
    wide = x.to(torch.float32)
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)
