"""The options of `LLM`, checked before any work: those of the engine, which are declared here, and the compiler's.

Commands make their flags of the fields, so this module does without torch.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ...compiler.options import CompileOptions, OptionError, check_choices, describe, documented, option
from ...graphs.families import ATTENTION_MODULES, MLP_MODULES, PACKED_MODULES
from ..api.checks import MAX_DRAFTS, is_speculation, plain
from ..quantization.file_names import AUTO, OFF

MAX_NUM_SEQS = 256
DEFAULT_MAX_LORAS = 8
MAX_ADAPTER_SLOTS = 256
MAX_RANK = 512
PROJECTIONS = ATTENTION_MODULES + MLP_MODULES
TARGET_NAMES = (*PROJECTIONS, *PACKED_MODULES, "all")


@documented
@dataclass(frozen=True)
class EngineOptions:
    """Sizes and places; `LLM` takes them and those of CompileOptions."""

    dtype: Any = option("auto", "vLLM's spelling of precision bf16 and fp32: auto, bfloat16 or float32")
    kv_cache_dtype: str = option(
        "auto", "what the KV cache holds", unset="as the precision says", more="vLLM's name of kv_dtype; also fp8"
    )
    calibration: Any = option(
        "auto",
        "what `sidestream calibrate` wrote, or 'off' for none",
        unset="sidestream_calibration.safetensors in the model's directory; without it an int8 engine on a GPU "
        "calibrates a model that takes less than a minute itself, once",
        more="decides what kv_dtype, hadamard, center_keys and smooth_channels come to where they are not given",
    )
    rounded_weights: Any = option(
        None,
        "what `sidestream calibrate --round` wrote, or 'off' to round weights to nearest",
        unset="sidestream_rounded_PRECISION.safetensors in the model's directory, if it is there",
        more="decides what norm_rotation comes to where it is not given",
    )
    passes: Any = option(
        None,
        "the compiler's pass list, for those who add one with `insert_pass`",
        unset="sidestream.compiler.pipeline.PASSES",
    )
    generation_config: Any = option(
        "auto",
        "sampling defaults of requests that do not set them: auto: those of the model's generation_config.json, vllm: "
        "none, or a directory with such a file",
        more="its temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens, as in vLLM",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = option("auto", "dummy: random weights, for measurements")
    device: Any = option(
        None, "where the model runs", unset="cuda where there is one", more="such as 'cuda:1' or 'cpu'"
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + answer, in tokens",
        unset="the model's limit, at most 8192",
        range=(2, 1 << 24),
    )
    max_num_seqs: int | None = option(
        None, "requests that run at once", unset="256, on a CPU 16", range=(1, MAX_NUM_SEQS)
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens of one step; longer prompts are cut into chunks",
        unset="8192, on a CPU 512",
        range=(1, 1 << 16),
    )
    max_loras: int | None = option(
        None,
        "adapters that one batch may mix",
        unset="as many as are loaded, at most 8",
        range=(0, MAX_ADAPTER_SLOTS),
    )
    max_lora_rank: int | None = option(
        None, "highest rank that is accepted", unset="that of the adapters at the start", range=(1, MAX_RANK)
    )
    lora_target_modules: Any = option(
        None,
        "projections that accepted adapters may change: names such as q_proj, or all",
        unset="those that the adapters at the start change; all where there are none",
        more="q/k/v and gate/up are there together",
    )
    max_cpu_loras: int = option(64, "adapters kept ready in host memory", range=(1, 1 << 16))
    lora_lenient: bool = option(False, "ignore unknown fields of an adapter's adapter_config.json")
    num_kv_pages: int | None = option(None, "KV pages of 64 tokens", unset="what the memory leaves", range=(1, 1 << 24))
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory to use")
    enforce_eager: bool = option(False, "run step by step instead of replaying CUDA graphs")
    fail_on_compilation: bool = option(
        False, "fail a step that would compile a kernel, instead of waiting for the compiler; for tests and benches"
    )
    enable_prefix_caching: bool = option(True, "keep the keys and values of prompts for later requests")
    speculation: Any = option(
        "off",
        "drafts of tokens, made from a request's own ones and former answers, that one step verifies together: off, "
        "auto or 1 to 7",
        more="the same tokens, in fewer steps; auto: as many as pay, request by request",
    )
    speculation_history: int = option(
        8192,
        "with speculation: tokens of former answers that are kept for each adapter, to draft from; 0: none",
        more="shared by all requests for the same adapter",
        range=(0, 1 << 16),
    )
    draft: Any = option(
        None,
        "with speculation: the directory of an EAGLE-3 head that was trained for the model, and drafts where its own "
        "tokens and former answers do not repeat themselves",
        unset="none",
        more="an adapter may have a LoRA of its own for it, in its subdirectory draft",
    )
    enable_sleep_mode: bool = option(
        False, "let `sleep` give the device's memory back for a while", more="weights and KV cache keep their addresses"
    )
    show_progress: bool = option(True, "show bars while adapters and weights are read")
    seed: int = option(0, "seed of the sampling", range=(-(1 << 63), (1 << 63) - 1))

    def __post_init__(self) -> None:
        check_choices(self)
        check_speculation(self.speculation)
        target_modules(self.lora_target_modules)
        if not isinstance(self.generation_config, (str, Path)):
            raise OptionError(f"generation_config={self.generation_config!r} must be 'auto', 'vllm' or a directory")
        for each in fields(self):
            if "range" in each.metadata:
                _check_range(each, getattr(self, each.name))
        if self.draft is not None and self.speculation == "off":
            raise OptionError(
                f"draft={str(self.draft)!r} makes drafts, and speculation is off; add speculation='auto' or a number"
            )
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

    @property
    def names_calibration(self) -> bool:
        """Whether a calibration or rounded weights were given, rather than left to be found or switched off."""
        return self.calibration not in (None, AUTO, OFF) or self.rounded_weights not in (None, OFF)

    @property
    def lora_targets(self) -> tuple[str, ...] | None:
        """See `target_modules`."""
        return target_modules(self.lora_target_modules)


def target_modules(value: Any) -> tuple[str, ...] | None:
    """The projections that `lora_target_modules` names; None where that is not given.

    Raises OptionError for what is neither "all" nor names of projections.
    """
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or any(name not in TARGET_NAMES for name in names):
        raise OptionError(f"lora_target_modules={value!r} must be 'all' or some of {', '.join(TARGET_NAMES[:-1])}")
    if "all" in names:
        return PROJECTIONS
    return tuple(projection for name in names for projection in PACKED_MODULES.get(name, (name,)))


def check_speculation(value: Any) -> None:
    """Raises OptionError for what is not "off", "auto" or a number of drafts."""
    if not is_speculation(value):
        raise OptionError(f"speculation={value!r} must be 'off', 'auto' or a number of drafts from 1 to {MAX_DRAFTS}")


def _check_range(option: "Field[Any]", value: Any) -> None:
    low, high = option.metadata["range"]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
        raise OptionError(f"{option.name}={value!r} must be an integer from {low} to {high}")


def keywords() -> dict[str, "Field[Any]"]:
    """Every keyword of `LLM` and the field that it fills."""
    found = {each.metadata.get("keyword", each.name): each for each in fields(CompileOptions)}
    found |= {each.name: each for each in fields(EngineOptions)}
    return {name: each for name, each in found.items() if name is not None}


def keyword_default(option: "Field[Any]") -> Any:
    """Return the default of `LLM` for a field; None where the model, its calibration or the device decides."""
    return None if option.metadata.get("decided_later") else option.default


def with_keywords(parameters: inspect.Signature) -> inspect.Signature:
    """A signature whose `**options` are spelled out as the keywords of `LLM`."""
    known = [each for each in parameters.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=keyword_default(each), annotation=each.type)
        for name, each in keywords().items()
    ]
    return parameters.replace(parameters=[*known, *named])


def keyword_docs() -> str:
    """A line or more for each keyword of `LLM`, for its docstring."""
    return "\n".join(describe(name, each, keyword_default(each)) for name, each in keywords().items())


def read_keywords(given: Mapping[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
    """The engine's options, and those fields of CompileOptions that were given, as `compile_options` takes them.

    Raises TypeError for a keyword that there is not, and OptionError for a value that cannot be.
    """
    known, given = keywords(), {name: plain(value) for name, value in given.items()}
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, [*known, "model", "adapters"], 1)
        raise TypeError(f"there is no option {unknown!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    own = {each.name for each in fields(EngineOptions)}
    engine = EngineOptions(**{name: value for name, value in given.items() if name in own})
    compiling = {
        known[name].name: value
        for name, value in given.items()
        if name not in own and not (value is None and known[name].metadata.get("decided_later"))
    }
    return engine, compiling
