"""CompileOptions: options of the compiler. Every field is part of a saved program's key.

Commands build their flags from the fields, so torch is imported only when a dtype is needed.
"""

import inspect
import textwrap
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

if TYPE_CHECKING:
    import torch

Precision = Literal["int8", "fp8", "bf16", "fp32"]
KvDtype = Literal["auto", "fp8_e4m3", "int8", "bf16", "fp32"]
Layers = bool | tuple[int, ...]  # all layers, none, or these
LoraLowering = Literal["auto", "serial", "side_stream"]
LoraDtype = Literal["auto", "bf16", "int8", "fp8"]
WholeLayer = Literal["auto", "on", "off"]
TENSOR_PARALLEL = (1, 2, 4, 8)
LAYERED = ("hadamard", "center_keys", "balance_keys", "rotate_values")  # options chosen by layer
NORM_ROTATIONS = (8, 16, 32, 64, 128)
EIGHT_BITS = ("int8", "fp8")  # precisions that quantize
DEFAULT_PRECISION: Precision = "int8"
# precision -> kv_dtype of "auto" without a calibration
DEFAULT_KV_DTYPE: dict[str, KvDtype] = {"int8": "int8", "fp8": "fp8_e4m3", "bf16": "bf16", "fp32": "fp32"}
# precision -> lora_dtype of "auto"; e4m3 would be faster than bf16, but less accurate
DEFAULT_LORA_DTYPE: dict[str, LoraDtype] = {"int8": "int8", "fp8": "bf16"}


Options = TypeVar("Options")


class OptionError(ValueError):
    """An option has an unknown value, or two options contradict each other."""


def option(default: Any, doc: str, *, unset: str = "", more: str = "", **metadata: Any) -> Any:
    """Return a dataclass field with its documentation.

    doc     a short description, also the help text of a command's flag
    unset   the effective default, if it is not the field's default
    more    details for the class's docstring
    Further keywords become metadata of the field.
    """
    return field(default=default, metadata={"doc": doc, "unset": unset, "more": more, **metadata})


def documented(options: type[Options]) -> type[Options]:
    """Add the fields' documentation to the class's docstring."""
    lines = [describe(each.name, each) for each in fields(options)]  # type: ignore[arg-type]
    options.__doc__ = "\n".join([f"{inspect.cleandoc(options.__doc__ or '')}\n", *lines])
    return options


def describe(name: str, option: "Field[Any]", default: Any = MISSING) -> str:
    """Return the docstring entry of a field under `name`."""
    doc, unset, more = (option.metadata[part] for part in ("doc", "unset", "more"))
    values = " or ".join((", ".join(map(repr, found[:-1])), repr(found[-1]))) if (found := choices(option)) else ""
    if option.type == Layers:
        values = "True, False or the layers"
    summary = f"{doc} (default: {unset or repr(option.default if default is MISSING else default)})"
    text = "; ".join(part for part in (summary, more, values) if part)
    return textwrap.fill(text, 116, initial_indent=f"{name:<23} ", subsequent_indent=" " * 24)


def choices(option: "Field[Any]") -> tuple[str, ...]:
    """Return the allowed values of a Literal field, else ()."""
    return get_args(option.type) if get_origin(option.type) is Literal else ()


def check_choices(options: Any) -> None:
    """Raise OptionError if a Literal field has a value that its type does not list."""
    for each in fields(options):
        allowed, value = choices(each), getattr(options, each.name)
        if allowed and value not in allowed:
            raise OptionError(f"{each.name}={value!r} is not known; choose one of {', '.join(allowed)}")


@documented
@dataclass(frozen=True)
class CompileOptions:
    """Options of `sidestream.compile` and of `LLM`.

    Metadata of a field: `keyword` is its name in `LLM` if that differs (None: not in LLM); `decided_later`: without the
    keyword, LLM chooses the value from the model, its calibration or the device.
    """

    precision: Precision = option(
        DEFAULT_PRECISION,
        "int8 and fp8 quantize weights, activations and KV cache; bf16 and fp32 nothing",
        unset="int8; for an LLM on a CPU as the checkpoint stores its weights, float16 as fp32",
        more="int8: whole numbers, one scale per row, adapters too; fp8: e4m3, at the same speed, with eight to twelve "
        "times the KL to 16 bits; bf16 and fp32 are references for accuracy",
        decided_later=True,
    )
    kv_dtype: KvDtype = option(
        "auto", "dtype of the KV cache", unset="int8 in int8 mode, fp8_e4m3 in fp8 mode, else the model's dtype"
    )
    hadamard: Layers = option(
        True,
        "layers in which Q and K are rotated before K is quantized",
        unset="as calibrated, else on",
        more="by a Walsh-Hadamard transform, for quantized caches only",
        decided_later=True,
    )
    center_keys: Layers = option(
        False,
        "layers in which a calibrated constant is subtracted from K before it is quantized",
        unset="as calibrated, else off",
        more="per channel, for quantized caches only; it does not change softmax",
        decided_later=True,
    )
    balance_keys: Layers = option(
        True,
        "layers in which K and Q are scaled to equal magnitudes",
        unset="on",
        more="each RoPE pair of K is multiplied by a factor, and of Q divided by it",
    )
    rotate_values: Layers = option(
        False,
        "layers in which V is rotated by its weights",
        unset="as in the rounded weights, else off",
        more="by a Walsh-Hadamard transform of each head that is folded into W_v, W_o and the adapters",
    )
    rotate_activations: bool = option(
        True,
        "in int8 mode, rotate activations in blocks of columns before they are quantized (64 after norms, 128 after "
        "SiLU), and weights alike",
    )
    norm_rotation: int = option(
        64,
        "in int8 mode, columns of a rotated block after norms",
        unset="as in the rounded weights, else 64",
        more="a power of two up to 128; wider blocks are more accurate and slower",
    )
    smooth_channels: bool = option(
        False,
        "in int8 mode, equalize the channels after each norm and after SiLU * mul by calibrated powers of two",
        unset="as calibrated, else off",
        more="folded into the norm's gain, or the rows of up_proj, and the columns of the weights and adapters that "
        "read it",
        decided_later=True,
    )
    rounded_weights: bool = option(
        False,
        "use weights of linears rounded by `sidestream calibrate --round`, instead of to nearest",
        keyword=None,
    )
    lm_head: Literal["auto", "bf16"] = option(
        "auto", "auto: quantize the output projection like the other linears; bf16: keep it in bf16"
    )
    finer_logits: bool = option(
        True,
        "in int8 mode, return the logits of a bf16 model in fp16, with eight times finer steps",
        more="off in torch.compile, which must return the model's own dtype",
    )
    finer_residual: bool = option(
        True,
        "in int8 mode, store the residual stream of a bf16 model in fp16, divided by 16, with eight times finer steps",
        more="values beyond 1,048,064 are clamped",
    )
    disable: tuple[str, ...] = option(
        (),
        "disable a compiler pass by its name, as listed by `sidestream inspect dump`",
        more="`sidestream.compiler.pipeline.PASSES` has all passes",
        keyword="disable_passes",
    )
    lora_lowering: LoraLowering = option(
        "auto",
        "stream of the LoRA kernels",
        more="serial: the main stream; side_stream: at the same time as the base GEMMs; auto: the side stream in "
        "decode programs, the main stream in prompt programs, and in int8 the second half of LoRA inside other "
        "launches where that is faster (passes fuse_lora_silu_mul, fuse_lora_expand)",
        keyword="_lora_lowering",
    )
    lora_dtype: LoraDtype = option(
        "auto",
        "dtype of adapters on the device: 16 bits, or the eight bits of the precision",
        unset="int8 with precision int8, else bf16",
        more="eight bits have one scale per row of A and B, and are faster",
    )
    lora_input: LoraDtype = option(
        "auto",
        "input of a LoRA shrink: the eight-bit rows of the linear next to it, or the rows before quantization",
        unset="the adapters' dtype",
        keyword="_lora_input",
    )
    lora_sm_share: float | None = option(
        None,
        "share of the SMs that LoRA's kernels may use on the side stream; the base uses the rest",
        unset="neither is limited, which is fastest",
    )
    whole_layer: WholeLayer = option(
        "auto",
        "whether the linears between two attentions are one launch in decode programs without LoRA",
        more="on: for all sizes that the kernel supports; auto: for those where it is faster; activations then have "
        "one scale per token and 128 columns",
    )
    tensor_parallel: int = option(
        1,
        "processes that share the model, each on its own GPU with its part of every weight: 1, 2, 4 or 8",
        keyword="tensor_parallel_size",
        more="it must divide the numbers of heads and intermediate_size; with fewer KV heads, several ranks have the "
        "same",
    )
    tensor_parallel_rank: int = option(0, "tensor-parallel rank of the programs", keyword=None)
    gather_logits: bool = option(
        True, "with tensor_parallel: whether programs return all logits, or only the rank's part", keyword=None
    )
    size_independent: bool = option(
        False,
        "compute a token on a CPU with the same bits in programs of every size",
        keyword=None,
        more="disables the passes, LoRA's partial sums and the fp8 queries that are used at some sizes only and round "
        "differently there; the kernels of a GPU still choose tiles and splits by size",
    )
    exact: bool = option(
        False,
        "compute a token with the same bits in every batch, chunk, cache and restart",
        more="only int8 on one GPU, without speculation, experts and adapters' other parts; steps compute either "
        "prompts or sampled tokens. On a GPU kernels then have constants that do not depend on the size of a step",
    )
    pdl: bool = option(True, "programmatic dependent launch between neighbours of a stream", keyword=None)
    check_counts: bool = option(
        True, "fail when a pass has another number of matches than the model's shape implies", keyword=None
    )

    def __post_init__(self) -> None:
        check_choices(self)
        object.__setattr__(self, "disable", tuple(self.disable))
        for name in LAYERED:
            object.__setattr__(self, name, _layers(name, getattr(self, name)))
        if self.norm_rotation not in NORM_ROTATIONS:
            raise OptionError(f"norm_rotation={self.norm_rotation!r} must be one of {NORM_ROTATIONS}")
        if type(self.tensor_parallel) is not int or self.tensor_parallel not in TENSOR_PARALLEL:
            raise OptionError(f"tensor_parallel={self.tensor_parallel!r} must be one of {TENSOR_PARALLEL}")
        if self.tensor_parallel_rank not in range(self.tensor_parallel):
            raise OptionError(f"tensor_parallel_rank={self.tensor_parallel_rank!r} must be below tensor_parallel")
        if self.lora_sm_share is not None and not 0.0 < self.lora_sm_share < 1.0:
            raise OptionError(
                f"lora_sm_share={self.lora_sm_share} must be between 0 and 1; 0.25 is a quarter of the SMs"
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
        if self.exact:
            self._check_exact()
            object.__setattr__(self, "size_independent", True)

    def _check_exact(self) -> None:
        """Raise OptionError for a value with which roundings depend on the size of a step."""
        supported = {
            "precision": ("int8",),
            "kv_dtype": ("int8", "auto"),
            "lm_head": ("auto",),
            "lora_dtype": ("int8", "auto"),
            "lora_input": ("int8", "auto"),
            "whole_layer": ("off", "auto"),
            "tensor_parallel": (1,),
        }
        for name, values in supported.items():
            if (given := getattr(self, name)) not in values:
                keyword = "tensor_parallel_size" if name == "tensor_parallel" else name
                raise OptionError(
                    f"{keyword}={given!r} contradicts exact=True, which supports only {keyword}={values[0]!r}; use "
                    "that, or leave exact out"
                )

    @property
    def model_dtype(self) -> "torch.dtype":
        """The dtype of activations and unquantized weights."""
        return torch_dtype("fp32" if self.precision == "fp32" else "bf16")

    @property
    def quantizes(self) -> bool:
        """Whether weights and activations have eight bits."""
        return self.precision in EIGHT_BITS

    @property
    def cache_dtype(self) -> "torch.dtype":
        """The dtype of the KV cache."""
        return torch_dtype(self._cache)

    @property
    def _cache(self) -> KvDtype:
        return self.kv_dtype if self.kv_dtype != "auto" else DEFAULT_KV_DTYPE[self.precision]

    @property
    def quantizes_kv(self) -> bool:
        """Whether the KV cache is quantized (and has scales)."""
        return self._cache in ("fp8_e4m3", "int8")

    def applies(self, name: str, layer: int | None) -> bool:
        """Return whether the option `name` (one of `LAYERED`) is on in a layer; `layer` None: unknown number."""
        chosen = getattr(self, name)
        return chosen if isinstance(chosen, bool) else layer in chosen

    @property
    def quantizes_lora(self) -> bool:
        """Whether the adapter stacks have eight bits and scales."""
        return (
            self.quantizes
            and (DEFAULT_LORA_DTYPE[self.precision] if self.lora_dtype == "auto" else self.lora_dtype) in EIGHT_BITS
        )

    @property
    def quantizes_lora_input(self) -> bool:
        """Whether LoRA shrinks read the quantized activations."""
        return self.quantizes_lora and self.lora_input != "bf16"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def _layers(name: str, value: Any) -> Layers:
    """Return True, False, or sorted distinct layer numbers."""
    if isinstance(value, bool):
        return value
    numbers = tuple(value) if isinstance(value, (tuple, list, set, frozenset, range)) else None
    if numbers is None or any(
        isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers
    ):
        raise OptionError(f"{name}={value!r} must be True, False, or the numbers of layers, such as (0, 3, 4)")
    return tuple(sorted(set(numbers)))


def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch dtype named by an option's value."""
    import torch

    return {
        "int8": torch.int8,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }[name]
