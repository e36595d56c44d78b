"""What a user may ask of the compiler; every field is part of a saved program's key."""
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

Precision = Literal["fp8", "bf16", "fp32"]
KvDtype = Literal["auto", "fp8_e4m3", "int8", "bf16", "fp32"]
LoraLowering = Literal["auto", "serial", "side_stream"]
WholeLayer = Literal["auto", "on", "off"]


class OptionError(ValueError):
    """An option has an unknown value, or two options contradict each other."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of `sidestream.compile` and `LLM`.

    precision      `fp8`: weights, activations and KV quantized, one scale per row; `bf16` and `fp32`: nothing is quantized (the oracle)
    kv_dtype       what the KV cache holds; `auto`: fp8_e4m3 in fp8 mode, else the model's dtype
    hadamard       rotate Q and K by a Walsh-Hadamard transform before K is quantized (quantized caches only)
    lm_head        `fp8` or `bf16`: whether the output projection is quantized in fp8 mode
    disable        names of passes to leave out (`sidestream.compiler.pipeline.PASSES` lists them)
    lora_lowering  `serial`: LoRA on the main stream; `side_stream`: beside the base GEMMs; `auto`: side stream for decode programs
    lora_sm_share  share of the SMs that LoRA's kernels may use on the side stream, the base keeps the rest; None: neither is limited (the fastest)
    whole_layer    the linears between two attentions as one launch in decode programs without LoRA: `on` wherever the kernel takes the sizes, `auto` where it
                   gains, `off`; their activations then have one scale per token and 128 columns
    pdl            programmatic dependent launch between neighbours of a stream
    check_counts   fail when a pass matches another number of times than the model's shape implies
    """

    precision: Precision = "fp8"
    kv_dtype: KvDtype = "auto"
    hadamard: bool = True
    lm_head: Literal["fp8", "bf16"] = "fp8"
    disable: tuple[str, ...] = ()
    lora_lowering: LoraLowering = "auto"
    lora_sm_share: float | None = None
    whole_layer: WholeLayer = "auto"
    pdl: bool = True
    check_counts: bool = True

    def __post_init__(self) -> None:
        choices = {"precision": get_args(Precision), "kv_dtype": get_args(KvDtype), "lora_lowering": get_args(LoraLowering), "lm_head": ("fp8", "bf16"),
                   "whole_layer": get_args(WholeLayer)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}")
        object.__setattr__(self, "disable", tuple(self.disable))
        if self.lora_sm_share is not None and not 0.0 < self.lora_sm_share < 1.0:
            raise OptionError(f"lora_sm_share={self.lora_sm_share} must lie between 0 and 1; 0.25 gives LoRA a quarter of the SMs")
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
        chosen = self.kv_dtype if self.kv_dtype != "auto" else {"fp8": "fp8_e4m3", "bf16": "bf16", "fp32": "fp32"}[self.precision]
        return {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}[chosen]

    @property
    def quantizes_kv(self) -> bool:
        """Whether the KV cache is quantized (and so has scales)."""
        return self.cache_dtype in (torch.float8_e4m3fn, torch.int8)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
