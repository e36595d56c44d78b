"""The options of `LLM`, checked before any work: EngineOptions, declared here, and the compiler's CompileOptions.

Imports no torch, because commands make their flags from the fields.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ...compiler.options import CompileOptions, OptionError, check_choices, describe, documented, option
from ...graphs.adapter_config import MAX_RANK
from ...graphs.families import (
    ADAPTER_PARTS,
    ATTENTION_MODULES,
    EXPERT_TARGETS,
    MLP_MODULES,
    PACKED_MODULES,
    VOCABULARY_TARGETS,
)
from ..api.checks import MAX_DRAFTS, is_speculation, plain
from ..api.errors import RequestError
from ..api.sampling_defaults import check_override
from ..api.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_LOGPROBS
from ..quantization.defaults import AUTO, OFF

MAX_NUM_SEQS = 256
DEFAULT_MAX_LORAS = 8
MAX_ADAPTER_SLOTS = 256
DEFAULT_DISK_GB = 100.0
PROJECTIONS = ATTENTION_MODULES + MLP_MODULES
TARGET_NAMES = (*PROJECTIONS, *PACKED_MODULES, *VOCABULARY_TARGETS, *EXPERT_TARGETS, "all")


@documented
@dataclass(frozen=True)
class EngineOptions:
    """Options of `LLM`, besides those of CompileOptions."""

    dtype: Any = option("auto", "vLLM's name of precision bf16 and fp32: auto, bfloat16 or float32")
    kv_cache_dtype: str = option(
        "auto", "dtype of the KV cache", unset="that of the precision", more="vLLM's name of kv_dtype; also fp8"
    )
    calibration: Any = option(
        "auto",
        "file written by `sidestream calibrate`, or 'off' for none",
        unset="sidestream_calibration.safetensors in the model's directory; without it an int8 engine on a GPU "
        "calibrates the model once if that takes less than a minute",
        more="sets kv_dtype, hadamard, center_keys and smooth_channels unless they are given",
    )
    rounded_weights: Any = option(
        None,
        "file written by `sidestream calibrate --round`, or 'off' to round weights to nearest",
        unset="sidestream_rounded_PRECISION.safetensors in the model's directory, if it exists",
        more="sets norm_rotation and rotate_values unless they are given",
    )
    passes: Any = option(
        None,
        "the compiler's passes, see `insert_pass`",
        unset="sidestream.compiler.pipeline.PASSES",
    )
    generation_config: Any = option(
        "auto",
        "source of sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory with "
        "such a file",
        more="temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens, as in vLLM",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "sampling defaults in place of those of generation_config",
        more="such as {'temperature': 0.7}; None drops a value",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = option("auto", "dummy: random weights for measurements")
    device: Any = option(
        None, "device of the model", unset="cuda if available, else cpu", more="such as 'cuda:1' or 'cpu'"
    )
    max_model_len: int | None = option(
        None,
        "maximum number of tokens of prompt and answer together",
        unset="the model's limit, at most 8192",
        range=(2, 1 << 24),
    )
    max_num_seqs: int | None = option(
        None, "maximum number of requests in a step", unset="256, on a CPU 16", range=(1, MAX_NUM_SEQS)
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens in a step; longer prompts are cut into chunks",
        unset="8192, on a CPU 512",
        range=(1, 1 << 16),
    )
    max_loras: int | None = option(
        None,
        "maximum number of adapters in a step",
        unset="number of adapters at the start, at most 8",
        more="with adapters of experts at most as many as a fifth of the GPU's memory holds",
        range=(0, MAX_ADAPTER_SLOTS),
    )
    max_lora_rank: int | None = option(
        None, "maximum rank of adapters", unset="that of the adapters at the start", range=(1, MAX_RANK)
    )
    max_expert_rank: int | None = option(
        None,
        "maximum rank of adapters on experts",
        unset="that of the adapters at the start; without adapters max_lora_rank",
        more="a slot has room for it on every expert",
        range=(1, MAX_RANK),
    )
    lora_target_modules: Any = option(
        None,
        "modules that adapters may change: names such as q_proj, all projections (all), embed_tokens or lm_head; of "
        "experts router, experts_gate_up and experts_down",
        unset="those of the adapters at the start; without adapters all",
        more="one of q, k and v includes all three, and one of gate and up includes both",
    )
    lora_parts: Any = option(
        None,
        "what adapters may have besides LoRA: dora (magnitudes), ia3 (factors of IA3) and bias (trained biases, "
        "biases of B, and biases with factors of IA3)",
        unset="those of the adapters at the start",
        more="steps without such adapters take no longer",
    )
    max_cpu_loras: int = option(64, "maximum number of adapters in host memory", range=(1, 1 << 16))
    max_adapter_sums: int = option(
        64,
        "maximum number of weighted sums of adapters that are kept",
        more="of different adapters or weights; the least recently used sum is made again at its next request",
        range=(1, 1 << 16),
    )
    adapter_versions: int = option(
        4,
        "number of newest versions to keep of each adapter that is updated from memory",
        more="requests that run keep older ones until they end",
        range=(1, 1 << 10),
    )
    max_logprobs: int = option(
        DEFAULT_MAX_LOGPROBS,
        "largest logprobs and prompt_logprobs of a request; -1: the whole vocabulary",
        more="a step sorts as many logits as its largest request asks for",
        range=(-1, MAX_LOGPROBS),
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = option(
        "raw_logprobs",
        "logprobs of sampled tokens: of the model, or after penalties, masks, temperature and filters",
        more="as in vLLM; prompt_logprobs are always those of the model, and only raw_logprobs allow scores",
    )
    lora_lenient: bool = option(False, "ignore unknown fields of an adapter's adapter_config.json")
    num_kv_pages: int | None = option(None, "KV pages of 64 tokens", unset="as many as fit", range=(1, 1 << 24))
    kv_host_gb: float = option(
        0.0,
        "GiB of host memory for KV pages of common prompt prefixes that leave the GPU; 0: none",
        more="with tensor_parallel_size shared by all GPUs; page-locked at the start",
        range=(0, 1 << 16),
    )
    kv_disk: Any = option(
        None,
        "directory for files of KV pages that are in host memory (kv_host_gb), also for later engines",
        unset="none",
        more="engines may share it",
    )
    kv_disk_gb: float | None = option(
        None,
        "GiB that all files in kv_disk may have; the least recently used ones are deleted",
        unset="100",
        range=(0, 1 << 20),
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory to use")
    enforce_eager: bool = option(False, "launch each kernel instead of replaying CUDA graphs")
    fail_on_compilation: bool = option(
        False, "fail a step that would have to compile a kernel, instead of waiting; for tests and benchmarks"
    )
    enable_prefix_caching: bool = option(True, "reuse keys and values of common prompt prefixes")
    cascade_attention: bool = option(
        True,
        "in decode steps of 128 and more requests, read KV pages that many of them share once",
        more="only in steps where that is faster; for head_dim 128, 8-bit caches, no sliding window and no speculation",
    )
    speculation: Any = option(
        "off",
        "draft tokens per step, from a request's own text and earlier answers: off, auto or 1 to 7",
        more="the output has the same tokens, in fewer steps; auto chooses the fastest number",
    )
    speculation_history: int = option(
        8192,
        "with speculation: tokens of earlier answers to keep for each adapter, as a source of drafts; 0: none",
        more="all requests with the same adapter share them",
        range=(0, 1 << 16),
    )
    draft: Any = option(
        None,
        "with speculation: directory of an EAGLE-3 head trained for the model; it drafts if earlier text has no match",
        unset="none",
        more="an adapter may have a LoRA for the head, in its subdirectory draft",
    )
    enable_sleep_mode: bool = option(
        False, "allow `sleep` to free device memory until `wake_up`", more="weights and KV cache keep their addresses"
    )
    show_progress: bool = option(True, "show progress bars while adapters and weights load")
    seed: int = option(0, "seed of the sampling", range=(-(1 << 63), (1 << 63) - 1))

    def __post_init__(self) -> None:
        check_choices(self)
        check_speculation(self.speculation)
        target_modules(self.lora_target_modules)
        object.__setattr__(self, "lora_parts", adapter_parts(self.lora_parts))
        if not isinstance(self.generation_config, (str, Path)):
            raise OptionError(f"generation_config={self.generation_config!r} must be 'auto', 'vllm' or a directory")
        try:
            check_override(self.override_generation_config or {})
        except RequestError as problem:
            raise OptionError(f"override_generation_config: {problem}") from None
        for each in fields(self):
            if "range" in each.metadata:
                _check_range(each, getattr(self, each.name))
        if self.draft is not None and self.speculation == "off":
            raise OptionError(
                f"draft={str(self.draft)!r} has no effect while speculation is off; add speculation='auto' or a number"
            )
        if self.kv_host_gb and not self.enable_prefix_caching:
            raise OptionError(f"kv_host_gb={self.kv_host_gb:g} contradicts enable_prefix_caching=False; leave one out")
        if self.kv_disk is not None and not isinstance(self.kv_disk, (str, Path)):
            raise OptionError(f"kv_disk={self.kv_disk!r} must be a directory")
        if self.kv_disk is not None and not self.kv_host_gb:
            raise OptionError(f"kv_disk={str(self.kv_disk)!r} is a tier below host memory; add kv_host_gb=16, or more")
        if self.kv_disk_gb is not None and self.kv_disk is None:
            raise OptionError(f"kv_disk_gb={self.kv_disk_gb:g} has no effect without a directory; add kv_disk='DIR'")
        if not isinstance(self.gpu_memory_utilization, (int, float)) or not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise OptionError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r} must be above 0 and at most 1; try 0.9"
            )
        if (
            self.max_num_seqs is not None
            and self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise OptionError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                "so a step has no token for some running sequences; raise max_num_batched_tokens or lower max_num_seqs"
            )

    @property
    def names_calibration(self) -> bool:
        """Whether a calibration or rounded weights were given by name."""
        return self.calibration not in (None, AUTO, OFF) or self.rounded_weights not in (None, OFF)

    @property
    def lora_targets(self) -> tuple[str, ...] | None:
        """Projections that adapters may change; None if they are not given."""
        return target_modules(self.lora_target_modules)


def target_modules(value: Any) -> tuple[str, ...] | None:
    """Return the projections that `lora_target_modules` names; None for None. Raises OptionError for others."""
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or any(name not in TARGET_NAMES for name in names):
        raise OptionError(f"lora_target_modules={value!r} must be 'all' or some of {', '.join(TARGET_NAMES[:-1])}")
    if "all" in names:
        names = (*PROJECTIONS, *(name for name in names if name in VOCABULARY_TARGETS))
    return tuple(projection for name in names for projection in PACKED_MODULES.get(name, (name,)))


def adapter_parts(value: Any) -> tuple[str, ...] | None:
    """Return the parts that `lora_parts` names; None for None. Raises OptionError for others."""
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or any(name not in ADAPTER_PARTS for name in names):
        raise OptionError(f"lora_parts={value!r} must be some of {', '.join(ADAPTER_PARTS)}, or [] for none")
    return tuple(names)


def check_speculation(value: Any) -> None:
    """Raise OptionError unless `value` is "off", "auto" or a number of drafts."""
    if not is_speculation(value):
        raise OptionError(f"speculation={value!r} must be 'off', 'auto' or a number of drafts from 1 to {MAX_DRAFTS}")


def _check_range(option: "Field[Any]", value: Any) -> None:
    low, high = option.metadata["range"]
    kinds, words = ((int, float), "a number") if option.type in (float, float | None) else (int, "an integer")
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high):
        raise OptionError(f"{option.name}={value!r} must be {words} from {low} to {high}")


def keywords(private: bool = False) -> dict[str, "Field[Any]"]:
    """Return the keywords of `LLM`, each with the field that it sets.

    `private` includes the keywords for evaluation and calibration, which begin with an underscore.
    """
    found = {each.metadata.get("keyword", each.name): each for each in fields(CompileOptions)}
    found |= {each.name: each for each in fields(EngineOptions)}
    return {name: each for name, each in found.items() if name is not None and (private or not name.startswith("_"))}


def keyword_default(option: "Field[Any]") -> Any:
    """Return the default of `LLM` for a field; None if the model, its calibration or the device decides."""
    return None if option.metadata.get("decided_later") else option.default


def with_keywords(parameters: inspect.Signature) -> inspect.Signature:
    """Return a signature with the keywords of `LLM` in place of its `**options`."""
    positional = [each for each in parameters.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=keyword_default(each), annotation=each.type)
        for name, each in keywords().items()
    ]
    return parameters.replace(parameters=[*positional, *named])


def keyword_docs() -> str:
    """Return the documentation of every keyword of `LLM`."""
    return "\n".join(describe(name, each, keyword_default(each)) for name, each in keywords().items())


def read_keywords(given: Mapping[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
    """Return the engine's options, and the given fields of CompileOptions as `compile_options` takes them.

    Raises TypeError for an unknown keyword, and OptionError for an invalid value.
    """
    known, given = keywords(private=True), {name: plain(value) for name, value in given.items()}
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, [*keywords(), "model", "adapters"], 1)
        raise TypeError(f"there is no option {unknown!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    own = {each.name for each in fields(EngineOptions)}
    engine = EngineOptions(**{name: value for name, value in given.items() if name in own})
    compiling = {
        known[name].name: value
        for name, value in given.items()
        if name not in own and not (value is None and known[name].metadata.get("decided_later"))
    }
    return engine, compiling
