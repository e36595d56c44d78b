"""CompileOptions: options of the compiler. Every field is part of a saved program's key.

Commands make their flags of the fields, so torch is imported only when a dtype is needed.
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
# kv_dtype="auto" where nothing was calibrated
DEFAULT_KV_DTYPE: dict[str, KvDtype] = {"int8": "int8", "fp8": "fp8_e4m3", "bf16": "bf16", "fp32": "fp32"}
# lora_dtype="auto": e4m3 is faster, and less accurate
DEFAULT_LORA_DTYPE: dict[str, LoraDtype] = {"int8": "int8", "fp8": "bf16"}


Options = TypeVar("Options")


class OptionError(ValueError):
    """An option has an unknown value, or two options contradict each other."""


def option(default: Any, doc: str, *, unset: str = "", more: str = "", **metadata: Any) -> Any:
    """Return a dataclass field with its documentation.

    doc     a short description, also the help text of a command's flag
    unset   the effective default, where the field's default does not show it
    more    details for Python's docstring
    Further metadata is kept with the field.
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
    said = f"{doc} (default: {unset or repr(option.default if default is MISSING else default)})"
    text = "; ".join(part for part in (said, more, values) if part)
    return textwrap.fill(text, 116, initial_indent=f"{name:<23} ", subsequent_indent=" " * 24)


def choices(option: "Field[Any]") -> tuple[str, ...]:
    """Return the allowed values of a Literal field, else ()."""
    return get_args(option.type) if get_origin(option.type) is Literal else ()


def check_choices(options: Any) -> None:
    """Raise OptionError for a Literal field with another value."""
    for each in fields(options):
        allowed, value = choices(each), getattr(options, each.name)
        if allowed and value not in allowed:
            raise OptionError(f"{each.name}={value!r} is not known; choose one of {', '.join(allowed)}")


@documented
@dataclass(frozen=True)
class CompileOptions:
    """Options of `sidestream.compile` and of `LLM`.

    Metadata of a field: `keyword` is its name in `LLM` where that differs (None: not in LLM); `decided_later`: the
    model, its calibration or the device decides if LLM does not get it.
    """

    precision: Precision = option(
        DEFAULT_PRECISION,
        "int8 and fp8 quantize weights, activations and KV cache; bf16 and fp32 nothing",
        unset="int8; for an LLM on a CPU as the checkpoint stores its weights, float16 as fp32",
        more="int8: whole numbers, one scale per row, adapters too; fp8: e4m3, at the same speed, with eight to twelve "
        "times the KL to 16 bits; bf16 and fp32 are the oracle",
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
        more="per channel, for quantized caches only; softmax does not see it",
        decided_later=True,
    )
    balance_keys: Layers = option(
        True,
        "layers in which K and Q are scaled to equal magnitudes",
        unset="on",
        more="each RoPE pair of K is scaled up or down, and of Q by the same",
    )
    rotate_values: Layers = option(
        False,
        "layers in which V is rotated by its weights",
        unset="as the rounded weights have them, else off",
        more="by a Walsh-Hadamard transform of each head that is folded into W_v, W_o and the adapters",
    )
    rotate_activations: bool = option(
        True,
        "in int8 mode, blocks of columns of what a norm (64) or SiLU (128) makes are rotated before they are "
        "quantized, and the weights' with them",
    )
    norm_rotation: int = option(
        64,
        "in int8 mode, columns of a rotated block of what a norm makes",
        unset="as the rounded weights have them, else 64",
        more="a power of two up to 128; wider blocks round finer and cost time",
    )
    smooth_channels: bool = option(
        False,
        "in int8 mode, make the channels after each norm and after SiLU * mul alike by calibrated powers of two",
        unset="as calibrated, else off",
        more="folded into the norm's gain, or the rows of up_proj, and the columns of the weights and adapters that "
        "read it",
        decided_later=True,
    )
    rounded_weights: bool = option(
        False,
        "take the weights of linears as `sidestream calibrate --round` has rounded them, instead of to nearest",
        keyword=None,
    )
    lm_head: Literal["auto", "bf16"] = option(
        "auto", "auto: quantize the output projection as the other linears; bf16: keep it in bf16"
    )
    finer_logits: bool = option(
        True,
        "in int8 mode, return the logits of a bf16 model in fp16, with eight times finer steps",
        more="off in torch.compile, which must return the model's own dtype",
    )
    finer_residual: bool = option(
        True,
        "in int8 mode, hold the residual stream of a bf16 model as sixteenths in fp16, with eight times finer steps",
        more="values beyond 1,048,064 are clamped",
    )
    disable: tuple[str, ...] = option(
        (),
        "leave a compiler pass out by its name, as `sidestream inspect dump` lists them",
        more="`sidestream.compiler.pipeline.PASSES` has them",
        keyword="disable_passes",
    )
    lora_lowering: LoraLowering = option(
        "auto",
        "on which stream LoRA runs",
        more="serial: on the main stream; side_stream: next to the base GEMMs; auto: on the side stream in decode "
        "programs, on the main stream in prompt programs, in int8 with its second half inside other launches where "
        "that gains (passes fuse_lora_silu_mul, fuse_lora_expand)",
        keyword="_lora_lowering",
    )
    lora_dtype: LoraDtype = option(
        "auto",
        "dtype of adapters on the device: 16 bits, or eight as the precision",
        unset="int8 with precision int8, else bf16",
        more="eight bits have one scale a row of A and B, and are faster",
    )
    lora_input: LoraDtype = option(
        "auto",
        "input of a LoRA shrink: the eight-bit rows of the linear next to it, or the rows before quantization",
        unset="the adapters' dtype",
        keyword="_lora_input",
    )
    lora_sm_share: float | None = option(
        None,
        "share of the SMs that LoRA's kernels may use on the side stream; the base keeps the rest",
        unset="neither is limited, the fastest",
    )
    whole_layer: WholeLayer = option(
        "auto",
        "whether the linears between two attentions are one launch in decode programs without LoRA",
        more="on: wherever the kernel takes the sizes; auto: where it gains; their activations then have one scale per "
        "token and 128 columns",
    )
    tensor_parallel: int = option(
        1,
        "processes that share the model, each on a GPU of its own with its part of every weight: 1, 2, 4 or 8",
        keyword="tensor_parallel_size",
        more="heads and intermediate_size must divide; KV heads that are fewer are held by several ranks",
    )
    tensor_parallel_rank: int = option(0, "tensor-parallel rank of the programs", keyword=None)
    gather_logits: bool = option(
        True, "with tensor_parallel: whether programs return all logits, or a rank its part of them", keyword=None
    )
    size_independent: bool = option(
        False,
        "compute a token alike in programs of every size",
        keyword=None,
        more="leaves out the passes, LoRA's partial sums and the fp8 queries that gain at some sizes only and round "
        "otherwise there",
    )
    pdl: bool = option(True, "programmatic dependent launch between neighbours of a stream", keyword=None)
    check_counts: bool = option(
        True, "fail when a pass matches another number of times than the model's shape implies", keyword=None
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
                f"lora_sm_share={self.lora_sm_share} must be between 0 and 1; 0.25 gives LoRA a quarter of the SMs"
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
        """Whether the option `name` (one of `LAYERED`) is on in a layer; `layer` None: its number is unknown."""
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
    """Return the dtype of an option's value."""
    import torch

    return {
        "int8": torch.int8,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }[name]
