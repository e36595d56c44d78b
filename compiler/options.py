"""What a user may ask of the compiler; every field is part of a saved program's key."""
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

Precision = Literal["fp8", "bf16", "fp32"]
KvDtype = Literal["auto", "fp8_e4m3", "int8", "bf16", "fp32"]
Layers = bool | tuple[int, ...]  # in every layer, in none, or in those that are named
LoraLowering = Literal["auto", "serial", "side_stream", "one_launch"]
LoraDtype = Literal["auto", "bf16", "fp8"]
WholeLayer = Literal["auto", "on", "off"]
DEFAULT_KV_DTYPE: KvDtype = "fp8_e4m3"  # what kv_dtype="auto" means in fp8 mode where nothing was calibrated: its prefill computes Q K^T in eight bits
DEFAULT_LORA_DTYPE: LoraDtype = "bf16"  # what lora_dtype="auto" means in fp8 mode: eight bits are faster, and not yet shown to answer as 16 do
DEFAULT_LORA_INPUT: LoraDtype = "fp8"  # what lora_input="auto" means beside fp8 adapters


class OptionError(ValueError):
    """An option has an unknown value, or two options contradict each other."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of `sidestream.compile` and `LLM`.

    precision      `fp8`: weights, activations and KV quantized, one scale per row; `bf16` and `fp32`: nothing is quantized (the oracle)
    kv_dtype       what the KV cache holds; `auto`: fp8_e4m3 in fp8 mode, else the model's dtype
    hadamard       rotate Q and K by a Walsh-Hadamard transform before K is quantized (quantized caches only); True, False, or the layers that do
    center_keys    subtract a calibrated constant per channel from K before it is quantized (quantized caches only; softmax does not see it); the same values
    rotate_values  rotate each head of V by a Walsh-Hadamard transform that is folded into W_v, W_o and the adapters; the same values
    lm_head        `fp8` or `bf16`: whether the output projection is quantized in fp8 mode
    disable        names of passes to leave out (`sidestream.compiler.pipeline.PASSES` lists them)
    lora_lowering  `serial`: LoRA on the main stream; `side_stream`: beside the base GEMMs; `one_launch`: inside the whole-layer launch where it takes the sizes
                   (decode programs, e4m3 adapters of rank 32 or 64), the rest on the side stream; `auto`: side stream for decode programs
    lora_dtype     what the adapter stacks hold: `bf16` (the model's dtype) or `fp8`, e4m3 with one scale a row of A and B, which is faster; `auto`: bf16
    lora_input     what a LoRA shrink reads: `fp8`, the same rows as the linear beside it (needs fp8 stacks), or `bf16`, the rows before quantization
    lora_sm_share  share of the SMs that LoRA's kernels may use on the side stream, the base keeps the rest; None: neither is limited (the fastest)
    whole_layer    the linears between two attentions as one launch in decode programs (with LoRA only by lora_lowering="one_launch"): `on` wherever the kernel
                   takes the sizes, `auto` where it gains, `off`; their activations then have one scale per token and 128 columns
    pdl            programmatic dependent launch between neighbours of a stream
    check_counts   fail when a pass matches another number of times than the model's shape implies
    """

    precision: Precision = "fp8"
    kv_dtype: KvDtype = "auto"
    hadamard: Layers = True
    center_keys: Layers = False
    rotate_values: Layers = False
    lm_head: Literal["fp8", "bf16"] = "fp8"
    disable: tuple[str, ...] = ()
    lora_lowering: LoraLowering = "auto"
    lora_dtype: LoraDtype = "auto"
    lora_input: LoraDtype = "auto"
    lora_sm_share: float | None = None
    whole_layer: WholeLayer = "auto"
    pdl: bool = True
    check_counts: bool = True

    def __post_init__(self) -> None:
        choices = {"precision": get_args(Precision), "kv_dtype": get_args(KvDtype), "lora_lowering": get_args(LoraLowering), "lm_head": ("fp8", "bf16"),
                   "whole_layer": get_args(WholeLayer), "lora_dtype": get_args(LoraDtype), "lora_input": get_args(LoraDtype)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}")
        object.__setattr__(self, "disable", tuple(self.disable))
        for name in ("hadamard", "center_keys", "rotate_values"):
            object.__setattr__(self, name, _layers(name, getattr(self, name)))
        if self.lora_sm_share is not None and not 0.0 < self.lora_sm_share < 1.0:
            raise OptionError(f"lora_sm_share={self.lora_sm_share} must lie between 0 and 1; 0.25 gives LoRA a quarter of the SMs")
        if self.lora_dtype == "fp8" and self.precision != "fp8":
            raise OptionError(f"lora_dtype='fp8' contradicts precision={self.precision!r}, which quantizes nothing; use precision='fp8' or lora_dtype='auto'")
        if self.lora_input == "fp8" and not self.quantizes_lora:
            raise OptionError("lora_input='fp8' needs adapters in fp8: use precision='fp8' with lora_dtype='fp8', or lora_input='auto'")
        if self.precision != "fp8" and self.kv_dtype in ("fp8_e4m3", "int8"):
            remedy = "use precision='fp8' or kv_dtype='auto'"
            raise OptionError(f"kv_dtype={self.kv_dtype!r} contradicts precision={self.precision!r}, which quantizes nothing; {remedy}")
        if self.kv_dtype == "fp32" and self.precision != "fp32":
            raise OptionError(f"kv_dtype='fp32' needs precision='fp32', not {self.precision!r}")
        if self.kv_dtype == "bf16" and self.precision == "fp32":
            raise OptionError("kv_dtype='bf16' contradicts precision='fp32'; use kv_dtype='auto'")

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of activations and of what is not quantized."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype that the KV cache holds."""
        chosen = self.kv_dtype if self.kv_dtype != "auto" else {"fp8": DEFAULT_KV_DTYPE, "bf16": "bf16", "fp32": "fp32"}[self.precision]
        return {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}[chosen]

    @property
    def quantizes_kv(self) -> bool:
        """Whether the KV cache is quantized (and so has scales)."""
        return self.cache_dtype in (torch.float8_e4m3fn, torch.int8)

    def applies(self, name: str, layer: int | None) -> bool:
        """Whether the option `name` (hadamard, center_keys or rotate_values) is on in a layer; None: a layer whose number is not known."""
        chosen = getattr(self, name)
        return chosen if isinstance(chosen, bool) else layer in chosen

    @property
    def quantizes_lora(self) -> bool:
        """Whether the adapter stacks hold e4m3 with scales."""
        return self.precision == "fp8" and (DEFAULT_LORA_DTYPE if self.lora_dtype == "auto" else self.lora_dtype) == "fp8"

    @property
    def quantizes_lora_input(self) -> bool:
        """Whether LoRA shrinks read the quantized activations."""
        return self.quantizes_lora and (DEFAULT_LORA_INPUT if self.lora_input == "auto" else self.lora_input) == "fp8"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def _layers(name: str, value: Any) -> Layers:
    """True, False, or layer numbers in ascending order, each once."""
    if isinstance(value, bool):
        return value
    numbers = tuple(value) if isinstance(value, (tuple, list, set, frozenset, range)) else None
    if numbers is None or any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        raise OptionError(f"{name}={value!r} must be True, False, or the numbers of layers, such as (0, 3, 4)")
    return tuple(sorted(set(numbers)))
