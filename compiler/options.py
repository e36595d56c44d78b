"""What a user may ask of the compiler; every field is part of a saved program's key."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

Precision = Literal["int8", "fp8", "bf16", "fp32"]
KvDtype = Literal["auto", "fp8_e4m3", "int8", "bf16", "fp32"]
Layers = bool | tuple[int, ...]  # in every layer, in none, or in those that are named
LoraLowering = Literal["auto", "serial", "side_stream"]
LoraDtype = Literal["auto", "bf16", "int8", "fp8"]
WholeLayer = Literal["auto", "on", "off"]
LAYERED = ("hadamard", "center_keys", "balance_keys", "rotate_values")  # options that are chosen by layer
EIGHT_BITS: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DEFAULT_PRECISION: Precision = "int8"
# kv_dtype="auto" where nothing was calibrated
DEFAULT_KV_DTYPE: dict[str, KvDtype] = {"int8": "int8", "fp8": "fp8_e4m3", "bf16": "bf16", "fp32": "fp32"}
# lora_dtype="auto": e4m3 is faster, and answers less as 16 bits do
DEFAULT_LORA_DTYPE: dict[str, LoraDtype] = {"int8": "int8", "fp8": "bf16"}


class OptionError(ValueError):
    """An option has an unknown value, or two options contradict each other."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of `sidestream.compile` and `LLM`.

    precision      `int8`: weights, activations, KV and adapters in whole numbers, one scale per row; `fp8`: weights,
                   activations and KV in e4m3, at the same speed, with eight to twelve times the KL to 16 bits; `bf16`
                   and `fp32`: nothing is quantized (the oracle)
    kv_dtype       what the KV cache holds; `auto`: int8 in int8 mode, fp8_e4m3 in fp8 mode, else the model's dtype
    hadamard       rotate Q and K by a Walsh-Hadamard transform before K is quantized (quantized caches only); True,
                   False, or the layers that do
    center_keys    subtract a calibrated constant per channel from K before it is quantized (quantized caches only;
                   softmax does not see it); the same values
    balance_keys   scale each RoPE pair of K up or down, and of Q by the same, so that both are of a size before they
                   are quantized; the same values
    rotate_values  rotate each head of V by a Walsh-Hadamard transform that is folded into W_v, W_o and the adapters;
                   the same values
    rotate_activations   int8 mode: blocks of columns of what a norm (8) or SiLU (128) makes are rotated before they are
                         quantized, and the weights' with them
    lm_head        `auto`: the output projection is quantized as the other linears are; `bf16`: it isn't
    disable        names of passes to leave out (`sidestream.compiler.pipeline.PASSES` lists them)
    lora_lowering  `serial`: LoRA on the main stream; `side_stream`: beside the base GEMMs; `auto`: on the side stream
                   in decode programs, on the main stream in prompt programs, in int8 with its second half inside other
                   launches where that gains (passes fuse_lora_silu_mul, fuse_lora_expand)
    lora_dtype     what the adapter stacks hold: `bf16` (the model's dtype), or `int8` and `fp8` (in the mode of that
                   name), one scale a row of A and B, which is faster; `auto`: int8 in int8 mode, else bf16
    lora_input     what a LoRA shrink reads: `int8` and `fp8`, the same rows as the linear beside it (stacks of that
                   dtype), or `bf16`, the rows before quantization; `auto`: the stacks' dtype
    lora_sm_share  share of the SMs that LoRA's kernels may use on the side stream, the base keeps the rest; None:
                   neither is limited (the fastest)
    whole_layer    the linears between two attentions as one launch in decode programs without LoRA: `on` wherever the
                   kernel takes the sizes, `auto` where it gains, `off`; their activations then have one scale per token
                   and 128 columns
    pdl            programmatic dependent launch between neighbours of a stream
    check_counts   fail when a pass matches another number of times than the model's shape implies
    """

    precision: Precision = DEFAULT_PRECISION
    kv_dtype: KvDtype = "auto"
    hadamard: Layers = True
    center_keys: Layers = False
    balance_keys: Layers = True
    rotate_values: Layers = False
    rotate_activations: bool = True
    lm_head: Literal["auto", "bf16"] = "auto"
    disable: tuple[str, ...] = ()
    lora_lowering: LoraLowering = "auto"
    lora_dtype: LoraDtype = "auto"
    lora_input: LoraDtype = "auto"
    lora_sm_share: float | None = None
    whole_layer: WholeLayer = "auto"
    pdl: bool = True
    check_counts: bool = True

    def __post_init__(self) -> None:
        choices = {
            "precision": get_args(Precision),
            "kv_dtype": get_args(KvDtype),
            "lora_lowering": get_args(LoraLowering),
            "lm_head": ("auto", "bf16"),
            "whole_layer": get_args(WholeLayer),
            "lora_dtype": get_args(LoraDtype),
            "lora_input": get_args(LoraDtype),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}")
        object.__setattr__(self, "disable", tuple(self.disable))
        for name in LAYERED:
            object.__setattr__(self, name, _layers(name, getattr(self, name)))
        if self.lora_sm_share is not None and not 0.0 < self.lora_sm_share < 1.0:
            raise OptionError(
                f"lora_sm_share={self.lora_sm_share} must lie between 0 and 1; 0.25 gives LoRA a quarter of the SMs"
            )
        if self.lora_dtype in EIGHT_BITS and self.precision != self.lora_dtype:
            remedy = f"use precision={self.lora_dtype!r} or lora_dtype='auto'"
            raise OptionError(f"lora_dtype={self.lora_dtype!r} contradicts precision={self.precision!r}; {remedy}")
        if self.lora_input in EIGHT_BITS and (self.lora_input != self.precision or not self.quantizes_lora):
            raise OptionError(
                f"lora_input={self.lora_input!r} needs adapters of that dtype: "
                f"use precision={self.lora_input!r} with lora_dtype={self.lora_input!r}, or lora_input='auto'"
            )
        if not self.quantizes and self.kv_dtype in ("fp8_e4m3", "int8"):
            remedy = "use precision='int8' or 'fp8', or kv_dtype='auto'"
            raise OptionError(
                f"kv_dtype={self.kv_dtype!r} contradicts precision={self.precision!r}, which quantizes nothing; "
                f"{remedy}"
            )
        if self.kv_dtype == "fp32" and self.precision != "fp32":
            raise OptionError(f"kv_dtype='fp32' needs precision='fp32', not {self.precision!r}")
        if self.kv_dtype == "bf16" and self.precision == "fp32":
            raise OptionError("kv_dtype='bf16' contradicts precision='fp32'; use kv_dtype='auto'")

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of activations and of what is not quantized."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def quantizes(self) -> bool:
        """Whether weights and activations have eight bits."""
        return self.precision in EIGHT_BITS

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype that the KV cache holds."""
        chosen = self.kv_dtype if self.kv_dtype != "auto" else DEFAULT_KV_DTYPE[self.precision]
        return {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}[
            chosen
        ]

    @property
    def quantizes_kv(self) -> bool:
        """Whether the KV cache is quantized (and so has scales)."""
        return self.cache_dtype in (torch.float8_e4m3fn, torch.int8)

    def applies(self, name: str, layer: int | None) -> bool:
        """Whether the option `name` (one of `LAYERED`) is on in a layer; None: a layer whose number is not known."""
        chosen = getattr(self, name)
        return chosen if isinstance(chosen, bool) else layer in chosen

    @property
    def quantizes_lora(self) -> bool:
        """Whether the adapter stacks hold eight bits with scales."""
        return (
            self.quantizes
            and (DEFAULT_LORA_DTYPE[self.precision] if self.lora_dtype == "auto" else self.lora_dtype) in EIGHT_BITS
        )

    @property
    def quantizes_lora_input(self) -> bool:
        """Whether LoRA shrinks read the quantized activations."""
        return self.quantizes_lora and self.lora_input != "bf16"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def _layers(name: str, value: Any) -> Layers:
    """True, False, or layer numbers in ascending order, each once."""
    if isinstance(value, bool):
        return value
    numbers = tuple(value) if isinstance(value, (tuple, list, set, frozenset, range)) else None
    if numbers is None or any(
        isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers
    ):
        raise OptionError(f"{name}={value!r} must be True, False, or the numbers of layers, such as (0, 3, 4)")
    return tuple(sorted(set(numbers)))
