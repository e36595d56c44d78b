"""Keywords of vLLM's `LLM`, and flags of its server, that there are not here: each is refused with what to do instead,
unless its value asks for what happens anyway.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...compiler.options import OptionError

DEFAULT_LORA_RANK = 16
DEFAULT_LORAS = 1


class Foreign(NamedTuple):
    """The values that are accepted, as they change nothing (None always is), and the remedy for all others."""

    accepted: tuple[Any, ...]
    remedy: str


ANY: Any = object()
"""Among the accepted values: every value is accepted."""
_ONE_GPU = "use tensor_parallel_size to spread a model over GPUs, or one engine for each GPU"
_TEXT_ONLY = "leave it out; the model reads text only"
_TOKENIZER = "put tokenizer.json or tokenizer.model into the model's directory; it is read from there"
_LOCAL = "download the model first and name its directory"
_WEIGHTS_STAY = "choose a smaller precision or fewer num_kv_pages; weights and KV cache stay on the GPU"

FOREIGN: dict[str, Foreign] = {
    "runner": Foreign(("auto", "generate"), "leave it out; this LLM generates text"),
    "convert": Foreign(("auto", "none"), "leave it out; this LLM generates text"),
    "task": Foreign(("auto", "generate"), "leave it out; this LLM generates text"),
    "tokenizer": Foreign((), _TOKENIZER),
    "tokenizer_mode": Foreign(("auto",), _TOKENIZER),
    "tokenizer_revision": Foreign((), _TOKENIZER),
    "skip_tokenizer_init": Foreign((False,), "pass token ids and set detokenize=False in SamplingParams"),
    "trust_remote_code": Foreign((False,), "leave it out; no code of a model is run (its chat template is sandboxed)"),
    "allowed_local_media_path": Foreign(("",), _TEXT_ONLY),
    "allowed_media_domains": Foreign(((), []), _TEXT_ONLY),
    "mm_processor_kwargs": Foreign(({},), _TEXT_ONLY),
    "limit_mm_per_prompt": Foreign(({},), _TEXT_ONLY),
    "pipeline_parallel_size": Foreign((1,), _ONE_GPU),
    "data_parallel_size": Foreign((1,), _ONE_GPU),
    "distributed_executor_backend": Foreign(("mp", "uni"), _ONE_GPU),
    "disable_custom_all_reduce": Foreign((False, True), _ONE_GPU),
    "quantization": Foreign((), "use precision='int8', 'fp8' or 'bf16'; weights are quantized while they are loaded"),
    "revision": Foreign((), _LOCAL),
    "code_revision": Foreign((), _LOCAL),
    "download_dir": Foreign((), _LOCAL),
    "hf_token": Foreign((False,), _LOCAL),
    "hf_overrides": Foreign(({},), "change config.json in the model's directory"),
    "swap_space": Foreign((0, 4), "lower max_num_seqs; what does not fit is computed again, not swapped"),
    "cpu_offload_gb": Foreign((0,), _WEIGHTS_STAY),
    "kv_cache_memory_bytes": Foreign((), "use num_kv_pages or gpu_memory_utilization"),
    "num_gpu_blocks_override": Foreign((), "use num_kv_pages"),
    "block_size": Foreign((64,), "leave it out; a KV page has 64 tokens"),
    "enable_chunked_prefill": Foreign((True,), "raise max_num_batched_tokens to the longest prompt"),
    "max_seq_len_to_capture": Foreign((8192,), "use enforce_eager=True to replay no CUDA graph"),
    "compilation_config": Foreign((0, {}), "use disable_passes and the other compiler options"),
    "speculative_config": Foreign((), "use speculation='auto' or a number, and draft=DIR for an EAGLE-3 head"),
    "structured_outputs_config": Foreign(({},), "leave it out; requests have structured_outputs"),
    "logits_processors": Foreign(((), []), "use logit_bias, temperature, top_k, top_p or min_p in SamplingParams"),
    "disable_async_output_proc": Foreign((False, True), "leave it out"),
    "override_pooler_config": Foreign((), "leave it out; this LLM generates text"),
    "pooler_config": Foreign((), "leave it out; this LLM generates text"),
    "max_logprobs": Foreign((20,), "ask for at most 20 in SamplingParams"),
    "disable_log_stats": Foreign((True, False), "leave it out; results carry metrics"),
    "fully_sharded_loras": Foreign((False,), _ONE_GPU),
    "served_model_name": Foreign((), "leave it out; requests name adapters, not models"),
}
_TOOLS = "calls of tools are always read, in the form that the model's chat template has"
_PROXY = "put a proxy that ends TLS and rewrites paths in front"
_LOGS = "requests are logged with --access-log FILE only"
FLAGS: dict[str, Foreign] = {
    "enable_auto_tool_choice": Foreign((True, False), _TOOLS),
    "tool_call_parser": Foreign((ANY,), _TOOLS),
    "enable_prefix_caching": Foreign((True,), "prompts are kept for later requests; --no-prefix-caching ends it"),
    "guided_decoding_backend": Foreign((ANY,), "llguidance constrains answers"),
    "disable_log_requests": Foreign((True, False), _LOGS),
    "enable_log_requests": Foreign((False,), "use --access-log FILE"),
    "disable_uvicorn_access_log": Foreign((True, False), _LOGS),
    "uvicorn_log_level": Foreign((ANY,), _LOGS),
    "disable_frontend_multiprocessing": Foreign((True, False), "HTTP has a process of its own"),
    "reasoning_parser": Foreign((), "leave it out; a model's thoughts stay in its answer's text"),
    "ssl_keyfile": Foreign((), _PROXY),
    "ssl_certfile": Foreign((), _PROXY),
    "root_path": Foreign((), _PROXY),
    "max_num_partial_prefills": Foreign((1,), "leave it out; prompts share every step"),
}
"""Flags of `vllm serve` that are no keywords of its `LLM`. The text says why an accepted one has no effect, or what to
do instead of another.
"""
ACCEPTED = ("enable_lora",)
"""vLLM's keywords that are understood without being options."""


def without_vllm_keywords(given: Mapping[str, Any], adapters: bool) -> dict[str, Any]:
    """The keywords that are options here; `adapters`: whether there are any at the start.

    `enable_lora=True` without adapters makes room for them, of vLLM's default sizes unless others are given.

    Raises OptionError for one of vLLM's that asks for what there is not.
    """
    kept = {name: value for name, value in given.items() if name not in FOREIGN and name not in ACCEPTED}
    if kept.get("seed", 0) is None:
        del kept["seed"]  # vLLM's default
    for name, value in given.items():
        foreign = FOREIGN.get(name)
        if foreign is not None and not asks_nothing(foreign, value):
            raise OptionError(f"{name}={value!r} is not supported; {foreign.remedy}")
    if "enable_lora" in given:
        enabled = given["enable_lora"]
        if not isinstance(enabled, bool):
            raise OptionError(f"enable_lora={enabled!r} must be True or False")
        if adapters and not enabled:
            raise OptionError("enable_lora=False contradicts adapters=...; give one of them")
        if enabled and not adapters:
            kept.setdefault("max_loras", DEFAULT_LORAS)
            kept.setdefault("max_lora_rank", DEFAULT_LORA_RANK)
    return kept


def asks_nothing(foreign: Foreign, value: Any) -> bool:
    """Whether a value of vLLM's asks for what happens anyway."""
    return value is None or any(each is ANY or _same(value, each) for each in foreign.accepted)


def _same(value: Any, accepted: Any) -> bool:
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    return bool(value == accepted)
