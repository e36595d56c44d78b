"""The options of `LLM`, checked before any work, and what they come to for a given model and device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...compiler.options import DEFAULT_PRECISION, LAYERED, CompileOptions, Layers, OptionError
from ...compiler.pipeline import PASSES, Pass, check_disabled
from ...ops.core.kv_layout import pages_for
from .calibration import Calibration

DEFAULT_MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8192
CPU_NUM_SEQS = 16
CPU_BATCHED_TOKENS = 512
DEFAULT_MAX_LORAS = 8
MAX_ADAPTER_SLOTS = 256
MAX_RANK = 512
LOAD_FORMATS = ("auto", "safetensors", "dummy")
_KV_DTYPES = {
    "auto": "auto",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "int8": "int8",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
}
_DTYPES = {
    "auto": None,
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float32": "fp32",
    "fp32": "fp32",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
_RANGES = {
    "max_model_len": (2, 1 << 24),
    "max_num_seqs": (1, MAX_NUM_SEQS),
    "max_num_batched_tokens": (1, 1 << 16),
    "max_loras": (0, MAX_ADAPTER_SLOTS),
    "max_lora_rank": (1, MAX_RANK),
    "max_cpu_loras": (1, 1 << 16),
    "num_kv_pages": (1, 1 << 24),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and places.

    max_model_len           most tokens (prompt + output) of a sequence; None = the model's own limit, at most 8192
    max_num_seqs            sequences computed at once; None = 256 (16 on the CPU)
    max_num_batched_tokens  query tokens of a step; longer prompts are computed in chunks; None = 8192 (512 on the CPU)
    max_loras               adapters resident on the device at once; None = as many as are given, at most 8
    max_lora_rank           largest adapter rank; None = the largest that is given
    max_cpu_loras           adapters kept ready in host memory
    num_kv_pages            KV pages of 64 tokens; None = what the memory leaves
    gpu_memory_utilization  share of the device's memory that may be used
    enable_prefix_caching   keep the KV pages of finished requests while there is room, and share equal beginnings of
                            prompts
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int = 64
    num_kv_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    show_progress: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high
            ):
                raise OptionError(f"{name}={value!r} must be an integer from {low} to {high}")
        if not isinstance(self.gpu_memory_utilization, (int, float)) or not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise OptionError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r} must lie above 0 and at most 1; 0.9 leaves "
                "a tenth to others"
            )
        if (
            self.max_num_seqs is not None
            and self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise OptionError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                "so not every running sequence would get its token in a step; raise the one or lower the other"
            )


@dataclass(frozen=True)
class EngineSizes:
    """What the options come to: every size is known."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def blocks(self) -> int:
        """Pages of the longest sequence: columns of the block table."""
        return pages_for(self.max_model_len)


def resolve_sizes(options: EngineOptions, max_positions: int, device: torch.device) -> EngineSizes:
    """Fill in what was left open. Raises OptionError for a max_model_len beyond the model's positions."""
    if options.max_model_len is not None and options.max_model_len > max_positions:
        raise OptionError(
            f"max_model_len={options.max_model_len} exceeds the model's max_position_embeddings={max_positions}; "
            "lower max_model_len to that"
        )
    on_cpu = device.type == "cpu"
    seqs = options.max_num_seqs or (CPU_NUM_SEQS if on_cpu else MAX_NUM_SEQS)
    if options.max_num_seqs is None and options.max_num_batched_tokens is not None:
        seqs = min(seqs, options.max_num_batched_tokens)
    tokens = options.max_num_batched_tokens or max(seqs, CPU_BATCHED_TOKENS if on_cpu else MAX_BATCHED_TOKENS)
    sizes = EngineSizes(options.max_model_len or min(max_positions, DEFAULT_MAX_MODEL_LEN), seqs, tokens)
    if options.num_kv_pages is not None and options.num_kv_pages < sizes.blocks:
        raise OptionError(
            f"num_kv_pages={options.num_kv_pages} do not hold one sequence of max_model_len={sizes.max_model_len} "
            "tokens; "
            f"give at least {sizes.blocks}, or lower max_model_len"
        )
    return sizes


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded, checked as far as that goes without the model: what `LLM`'s keywords come to.

    hadamard, center_keys  whether the calibration decides this field of `compiler`
    """

    engine: EngineOptions
    compiler: CompileOptions
    device: torch.device
    load_format: str
    passes: tuple[Pass, ...]
    calibration: str | Path | Calibration | None
    hadamard: bool
    center_keys: bool

    @property
    def dummy(self) -> bool:
        """Whether the weights are random."""
        return self.load_format == "dummy"


def load_options(
    *,
    precision: str = DEFAULT_PRECISION,
    kv_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    hadamard: Layers | None = None,
    dtype: Any = "auto",
    disable_passes: Sequence[str] = (),
    passes: tuple[Pass, ...] = PASSES,
    center_keys: Layers | None = None,
    balance_keys: Layers = True,
    rotate_values: Layers = False,
    calibration: str | Path | Calibration | None = None,
    lora_lowering: str = "auto",
    lora_sm_share: float | None = None,
    whole_layer: str = "auto",
    lm_head: str = "auto",
    load_format: str = "auto",
    lora_dtype: str = "auto",
    lora_input: str = "auto",
    rotate_activations: bool = True,
    device: str | torch.device | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    max_cpu_loras: int = 64,
    num_kv_pages: int | None = None,
    gpu_memory_utilization: float = 0.9,
    enforce_eager: bool = False,
    enable_prefix_caching: bool = True,
    show_progress: bool = True,
    seed: int = 0,
) -> LoadOptions:
    """The options from `LLM`'s keywords, which are described there. Raises OptionError."""
    engine = EngineOptions(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        num_kv_pages=num_kv_pages,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        enable_prefix_caching=enable_prefix_caching,
        show_progress=show_progress,
        seed=seed,
    )
    more = {
        "lora_lowering": lora_lowering,
        "lora_sm_share": lora_sm_share,
        "lm_head": lm_head,
        "whole_layer": whole_layer,
        "rotate_values": rotate_values,
        "lora_dtype": lora_dtype,
        "lora_input": lora_input,
        "rotate_activations": rotate_activations,
        "balance_keys": balance_keys,
    }
    compiler = compile_options(
        precision, dtype, kv_dtype, kv_cache_dtype, hadamard, tuple(disable_passes), more, center_keys
    )
    check_disabled(compiler, passes)
    if load_format not in LOAD_FORMATS:
        raise OptionError(f"load_format={load_format!r} is not known; choose one of {', '.join(LOAD_FORMATS)}")
    return LoadOptions(
        engine,
        compiler,
        resolve_device(device),
        load_format,
        passes,
        calibration,
        hadamard is None,
        center_keys is None,
    )


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device to use: the GPU if there is one, unless `device` says otherwise.

    Raises OptionError for one that is not there.
    """
    has_gpu = torch.cuda.is_available()
    try:
        chosen = torch.device(device if device is not None else "cuda" if has_gpu else "cpu")
    except RuntimeError as error:
        raise OptionError(f"device={device!r} is not a device; use 'cuda', 'cuda:0' or 'cpu'") from error
    if chosen.type not in ("cuda", "cpu"):
        raise OptionError(f"device={device!r} is not supported; use 'cuda' or 'cpu'")
    if chosen.type == "cpu":
        return torch.device("cpu")
    index = 0 if chosen.index is None else chosen.index
    if not has_gpu or index >= torch.cuda.device_count():
        count = torch.cuda.device_count() if has_gpu else 0
        raise OptionError(
            f"device={device!r} is not there; this machine has {count} CUDA devices; use device='cpu' to run without"
        )
    return torch.device("cuda", index)


def compile_options(
    precision: str,
    dtype: Any,
    kv_dtype: str,
    kv_cache_dtype: str,
    hadamard: Layers | None,
    disable: tuple[str, ...],
    more: Mapping[str, Any],
    center_keys: Layers | None = None,
) -> CompileOptions:
    """The compiler's options from LLM's spellings.

    Raises OptionError for unknown values and for options that contradict each other.
    """
    try:
        wanted = _DTYPES[dtype]
    except (KeyError, TypeError):
        raise OptionError(f"dtype={dtype!r} is not supported; use 'auto', 'bfloat16' or 'float32'") from None
    if wanted == "fp32" and precision in ("int8", "fp8", "bf16"):
        raise OptionError(f"dtype={dtype!r} contradicts precision={precision!r}; use precision='fp32'")
    if wanted == "bf16" and precision == "fp32":
        raise OptionError(f"dtype={dtype!r} contradicts precision='fp32'; use precision='bf16'")
    cache = {_kv_dtype("kv_dtype", kv_dtype), _kv_dtype("kv_cache_dtype", kv_cache_dtype)}
    if len(cache) > 1:
        cache.discard("auto")
    if len(cache) > 1:
        raise OptionError(
            f"kv_dtype={kv_dtype!r} contradicts kv_cache_dtype={kv_cache_dtype!r}; they are two names of one option, "
            "give one of them"
        )
    options: dict[str, Any] = {"precision": precision, "kv_dtype": cache.pop(), "disable": tuple(disable), **more}
    options |= {
        name: value for name, value in (("hadamard", hadamard), ("center_keys", center_keys)) if value is not None
    }
    result = CompileOptions(**options)
    for name, value in (("hadamard", hadamard), ("center_keys", center_keys)):
        if value and not result.quantizes_kv:
            raise OptionError(
                f"{name}={value} only helps a quantized KV cache, and this one is not; use precision='int8' or leave "
                f"{name} out"
            )
    return result


def check_layers(options: CompileOptions, layers: int) -> None:
    """Raises OptionError where an option names a layer that the model does not have."""
    for name in LAYERED:
        chosen = getattr(options, name)
        if not isinstance(chosen, bool) and chosen and chosen[-1] >= layers:
            raise OptionError(f"{name} names layer {chosen[-1]}, the model has layers 0 to {layers - 1}")


def _kv_dtype(name: str, value: str) -> str:
    if value not in _KV_DTYPES:
        raise OptionError(f"{name}={value!r} is not known; choose one of {', '.join(_KV_DTYPES)}")
    return _KV_DTYPES[value]
