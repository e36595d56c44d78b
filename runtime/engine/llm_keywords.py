"""The keywords of `LLM` for type checkers and editors.

EngineOptions and CompileOptions declare them with documentation and defaults; a test compares names and types.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ...compiler.options import KvDtype, LoraDtype, Precision, WholeLayer

if TYPE_CHECKING:
    import torch

    from ...compiler.pipeline import Pass
    from ..quantization.calibration import Calibration

Layers = bool | Collection[int]


class LLMKeywords(TypedDict, total=False):
    """The options of `LLM`, and vLLM's `enable_lora` and `speculative_config`."""

    precision: Precision | None
    kv_dtype: KvDtype
    hadamard: Layers | None
    center_keys: Layers | None
    balance_keys: Layers
    rotate_values: Layers
    rotate_activations: bool
    norm_rotation: int
    smooth_channels: bool | None
    lm_head: Literal["auto", "bf16"]
    finer_logits: bool
    finer_residual: bool
    disable_passes: Sequence[str]
    lora_dtype: LoraDtype
    lora_sm_share: float | None
    whole_layer: WholeLayer
    tensor_parallel_size: int
    exact: bool

    dtype: "str | torch.dtype"
    kv_cache_dtype: str
    calibration: "str | Path | Calibration | None"
    rounded_weights: str | Path | None
    passes: "tuple[Pass, ...] | None"
    load_format: Literal["auto", "safetensors", "dummy"]
    generation_config: str | Path
    override_generation_config: Mapping[str, Any] | None
    device: "str | torch.device | None"
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_loras: int | None
    max_lora_rank: int | None
    max_expert_rank: int | None
    lora_target_modules: str | Sequence[str] | None
    lora_parts: str | Sequence[str] | None
    max_cpu_loras: int
    max_adapter_sums: int
    adapter_versions: int
    max_logprobs: int
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    lora_lenient: bool
    num_kv_pages: int | None
    kv_host_gb: float
    kv_disk: str | Path | None
    kv_disk_gb: float | None
    gpu_memory_utilization: float
    enforce_eager: bool
    fail_on_compilation: bool
    enable_prefix_caching: bool
    cascade_attention: bool
    speculation: Literal["off", "auto"] | int
    speculation_history: int
    draft: str | Path | None
    enable_sleep_mode: bool
    show_progress: bool
    seed: int

    enable_lora: bool
    speculative_config: Mapping[str, Any] | None
