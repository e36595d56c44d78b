"""Values of `LLM`'s options for a given model and device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from ...compiler.options import DEFAULT_PRECISION, EIGHT_BITS, LAYERED, CompileOptions, OptionError, Precision
from ...compiler.pipeline import PASSES, Pass, check_disabled
from ...graphs.config import LlamaConfig
from ...ops.core.kv_layout import pages_for
from ..quantization.rounded_weights import ROUNDING_DECIDES
from .exact import check_exact
from .options import MAX_NUM_SEQS, EngineOptions

DEFAULT_MAX_MODEL_LEN = 8192
MAX_BATCHED_TOKENS = 8192
CPU_NUM_SEQS = 16
CPU_BATCHED_TOKENS = 512
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


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def blocks(self) -> int:
        """KV pages of the longest sequence: columns of the block table."""
        return pages_for(self.max_model_len)


def resolve_sizes(
    options: EngineOptions, max_positions: int, device: torch.device, usual: int | None = None
) -> EngineSizes:
    """Return the sizes, with defaults for those not given; `usual`: default context length, if below `max_positions`.

    Raises OptionError for a max_model_len beyond the model's positions.
    """
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
    sizes = EngineSizes(options.max_model_len or min(usual or max_positions, DEFAULT_MAX_MODEL_LEN), seqs, tokens)
    if options.num_kv_pages is not None and options.num_kv_pages < sizes.blocks:
        raise OptionError(
            f"num_kv_pages={options.num_kv_pages} do not hold one sequence of max_model_len={sizes.max_model_len} "
            f"tokens; give at least {sizes.blocks}, or lower max_model_len"
        )
    return sizes


@dataclass(frozen=True)
class PageTransfer:
    """Memory for KV pages that a prefill engine writes and decode engines read.

    role     of this engine
    sources  name -> path of the memories that it reads; that of the one that it writes
    """

    role: Literal["prefill", "decode"]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a model.

    hadamard, center_keys, smooth_channels  whether the calibration sets this field of `compiler`
    as_rounded  fields of `compiler` that rounded weights set
    transfer    memory for KV pages that engines on this host share, or None
    """

    engine: EngineOptions
    compiler: CompileOptions
    device: torch.device
    passes: tuple[Pass, ...]
    hadamard: bool
    center_keys: bool
    smooth_channels: bool
    as_rounded: tuple[str, ...]
    transfer: PageTransfer | None = None

    @property
    def dummy(self) -> bool:
        """Whether the weights are random."""
        return self.engine.load_format == "dummy"


def default_precision(engine: EngineOptions, config: LlamaConfig, device: torch.device) -> Precision:
    """Return the default precision.

    It is int8 on a GPU or with a given calibration. Otherwise it is that of the checkpoint's weights, because eight
    bits are not faster on a CPU. A float16 checkpoint runs in fp32, which represents its values exactly; bf16 has three
    bits of mantissa less.
    """
    if device.type != "cpu" or engine.names_calibration:
        return DEFAULT_PRECISION
    if config.weight_format in EIGHT_BITS:
        return cast(Precision, config.weight_format)
    return "bf16" if config.dtype == "bfloat16" else "fp32"


def load_options(
    engine: EngineOptions, given: Mapping[str, Any], device: torch.device, config: LlamaConfig
) -> LoadOptions:
    """Return the options for a model. `engine`, `given`: from `read_keywords`; `device`: from `resolve_device`.

    Raises OptionError for unknown or contradictory values.
    """
    default = DEFAULT_PRECISION if given.get("exact") else default_precision(engine, config, device)
    try:
        compiler = compile_options(engine, given, default, config.num_hidden_layers)
    except OptionError as problem:
        if "precision" in given or default == DEFAULT_PRECISION:
            raise
        raise OptionError(f"{problem}. precision={default!r}, of the checkpoint, is the default on a CPU") from None
    if compiler.exact:
        check_exact(engine, config)
    # on a CPU size-specific programs are no faster, so an answer need not depend on the size of its batch
    compiler = replace(compiler, size_independent=device.type == "cpu")
    # with a split vocabulary the sampler gathers the logits
    compiler = replace(compiler, gather_logits=compiler.tensor_parallel == 1)
    if engine.draft is not None and compiler.tensor_parallel > 1:
        raise OptionError(
            f"draft= with tensor_parallel_size={compiler.tensor_parallel} is not supported; leave one of them out"
        )
    passes = PASSES if engine.passes is None else engine.passes
    check_disabled(compiler, passes)
    return LoadOptions(
        engine,
        compiler,
        device,
        passes,
        hadamard="hadamard" not in given,
        center_keys="center_keys" not in given,
        smooth_channels="smooth_channels" not in given,
        as_rounded=tuple(name for name in ROUNDING_DECIDES if name not in given),
    )


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device to use, by default the GPU if there is one. Raises OptionError for an unavailable one."""
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
            f"device={device!r} is not available; this machine has {count} CUDA devices; use device='cpu' without a GPU"
        )
    return torch.device("cuda", index)


def compile_options(
    engine: EngineOptions,
    given: Mapping[str, Any],
    default: Precision = DEFAULT_PRECISION,
    layers: int | None = None,
) -> CompileOptions:
    """Return the compiler's options from the `given` fields (of `read_keywords`) and the engine's.

    default   precision if none is given; then `dtype` chooses between bf16 and fp32
    layers    number of the model's layers, if known

    Raises OptionError for unknown or contradictory values.
    """
    dtype = engine.dtype
    try:
        wanted = _DTYPES[dtype]
    except (KeyError, TypeError):
        raise OptionError(f"dtype={dtype!r} is not supported; use 'auto', 'bfloat16' or 'float32'") from None
    precision = given.get("precision", default if wanted is None or default in EIGHT_BITS else wanted)
    if wanted == "fp32" and precision in ("int8", "fp8", "bf16"):
        raise OptionError(f"dtype={dtype!r} contradicts precision={precision!r}; use precision='fp32'")
    if wanted == "bf16" and precision == "fp32":
        raise OptionError(f"dtype={dtype!r} contradicts precision='fp32'; use precision='bf16'")
    kv_dtype, kv_cache_dtype = given.get("kv_dtype", "auto"), engine.kv_cache_dtype
    cache = {_kv_dtype("kv_dtype", kv_dtype), _kv_dtype("kv_cache_dtype", kv_cache_dtype)}
    if len(cache) > 1:
        cache.discard("auto")
    if len(cache) > 1:
        raise OptionError(
            f"kv_dtype={kv_dtype!r} contradicts kv_cache_dtype={kv_cache_dtype!r}; they are two names of one option, "
            "give only one"
        )
    result = CompileOptions(**{**given, "precision": precision, "kv_dtype": cache.pop()})
    if layers is not None:
        check_layers(result, layers)
    if given.get("smooth_channels") and not result.quantizes:
        raise OptionError(
            f"smooth_channels=True contradicts precision={precision!r}, which quantizes nothing; use precision='int8' "
            "or leave smooth_channels out"
        )
    for name in ("hadamard", "center_keys"):
        if given.get(name) and not result.quantizes_kv:
            raise OptionError(
                f"{name}={given[name]} has an effect only if the KV cache is quantized; use precision='int8' or leave "
                f"{name} out"
            )
    return result


def check_layers(options: CompileOptions, layers: int) -> None:
    """Raise OptionError if an option names a layer that the model does not have."""
    for name in LAYERED:
        chosen = getattr(options, name)
        if not isinstance(chosen, bool) and chosen and chosen[-1] >= layers:
            raise OptionError(f"{name} names layer {chosen[-1]}, the model has layers 0 to {layers - 1}")


def _kv_dtype(name: str, value: str) -> str:
    if value not in _KV_DTYPES:
        raise OptionError(f"{name}={value!r} is not known; choose one of {', '.join(_KV_DTYPES)}")
    return _KV_DTYPES[value]
