"""Keywords of vLLM's `LLM` and of other engines: each is translated, or refused with a remedy unless its value has no
effect.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ...compiler.options import OptionError
from ..api.checks import MAX_DRAFTS, is_speculation
from ..api.unsupported import ANY as ANY
from ..api.unsupported import Unsupported as Unsupported
from ..api.unsupported import has_no_effect as has_no_effect
from .flag_spelling import with_keywords
from .launcher_flags import read_flags
from .options import keywords

_log = logging.getLogger("sidestream")
_PARAMETERS = {"model": "model", "lora_modules": "adapters"}
"""Flag that is no keyword of `LLM` -> its parameter."""
_SPECULATIVE_KEYS = (
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size",
)  # fmt: skip
DEFAULT_LORA_RANK = 16
DEFAULT_LORAS = 1


_ONE_GPU = "use tensor_parallel_size to spread a model over GPUs, or one engine for each GPU"
_TEXT_ONLY = "leave it out; the model reads text only"
_TOKENIZER = "put tokenizer.json or tokenizer.model into the model's directory; it is read from there"
_LOCAL = "download the model first and name its directory"
_WEIGHTS_STAY = "choose a smaller precision or fewer num_kv_pages; weights stay on the GPU"

UNSUPPORTED_KEYWORDS: dict[str, Unsupported] = {
    "runner": Unsupported(("auto", "generate"), "leave it out; this LLM generates text"),
    "convert": Unsupported(("auto", "none"), "leave it out; this LLM generates text"),
    "task": Unsupported(("auto", "generate"), "leave it out; this LLM generates text"),
    "tokenizer": Unsupported((), _TOKENIZER),
    "tokenizer_mode": Unsupported(("auto",), _TOKENIZER),
    "tokenizer_revision": Unsupported((), _TOKENIZER),
    "skip_tokenizer_init": Unsupported((False,), "pass token ids and set detokenize=False in SamplingParams"),
    "trust_remote_code": Unsupported((False,), "leave it out; no code of a model is run, its template is sandboxed"),
    "allowed_local_media_path": Unsupported(("",), _TEXT_ONLY),
    "allowed_media_domains": Unsupported(((), []), _TEXT_ONLY),
    "mm_processor_kwargs": Unsupported(({},), _TEXT_ONLY),
    "limit_mm_per_prompt": Unsupported(({},), _TEXT_ONLY),
    "pipeline_parallel_size": Unsupported((1,), _ONE_GPU),
    "data_parallel_size": Unsupported((1,), _ONE_GPU),
    "distributed_executor_backend": Unsupported(("mp", "uni"), _ONE_GPU),
    "disable_custom_all_reduce": Unsupported((False, True), _ONE_GPU),
    "quantization": Unsupported((), "use precision='int8', 'fp8' or 'bf16'; weights are quantized at load time"),
    "revision": Unsupported((), _LOCAL),
    "code_revision": Unsupported((), _LOCAL),
    "download_dir": Unsupported((), _LOCAL),
    "hf_token": Unsupported((False,), _LOCAL),
    "hf_overrides": Unsupported(({},), "change config.json in the model's directory"),
    "swap_space": Unsupported((0, 4), "lower max_num_seqs; preempted requests are computed again, not swapped"),
    "cpu_offload_gb": Unsupported((0,), _WEIGHTS_STAY),
    "kv_cache_memory_bytes": Unsupported((), "use num_kv_pages or gpu_memory_utilization"),
    "num_gpu_blocks_override": Unsupported((), "use num_kv_pages"),
    "block_size": Unsupported((64,), "leave it out; a KV page has 64 tokens"),
    "enable_chunked_prefill": Unsupported((True,), "raise max_num_batched_tokens to the longest prompt"),
    "max_seq_len_to_capture": Unsupported((8192,), "use enforce_eager=True to replay no CUDA graph"),
    "compilation_config": Unsupported((0, {}), "use disable_passes and the other compiler options"),
    "structured_outputs_config": Unsupported(({},), "leave it out; requests have structured_outputs"),
    "logits_processors": Unsupported(((), []), "use logit_bias, temperature, top_k, top_p or min_p in SamplingParams"),
    "disable_async_output_proc": Unsupported((False, True), "leave it out"),
    "override_pooler_config": Unsupported((), "leave it out; this LLM generates text"),
    "pooler_config": Unsupported((), "leave it out; this LLM generates text"),
    "disable_log_stats": Unsupported((True, False), "leave it out; results carry metrics"),
    "fully_sharded_loras": Unsupported((False,), _ONE_GPU),
    "served_model_name": Unsupported((), "leave it out; requests name adapters, not models"),
}
ACCEPTED = ("enable_lora", "speculative_config")
"""Supported keywords of vLLM that are not options of `LLM`."""


def without_vllm_keywords(given: Mapping[str, Any], adapters: bool) -> dict[str, Any]:
    """Return the keywords without those of vLLM and of other launchers; some of these have another name here.

    `enable_lora=True` without adapters sets max_loras and max_lora_rank to vLLM's defaults, unless they are given.
    `speculative_config` becomes speculation and draft.
    `adapters`: whether adapters are given at the start. Raises OptionError for a keyword that asks for an unsupported
    feature.
    """
    kept: dict[str, Any] = {}
    ineffective = []
    for name, value in given.items():
        if name == "speculative_config" and value is not None:
            try:
                found = speculation_of(value)
            except OptionError as problem:
                raise OptionError(f"{name}: {problem}") from None
            for twice in found.keys() & given.keys():
                raise OptionError(f"{name} contradicts {twice}; leave it out")
            kept |= found
        if name in ACCEPTED or (name == "seed" and value is None):  # vLLM's default
            continue
        is_ours = name in keywords(private=True)
        if value is None and not is_ours and (_flag(name) in read_flags()[0] or _unsupported(name)[0] is not None):
            continue  # the default of vLLM's EngineArgs, if not of the option here
        ours, translated = (name, value) if is_ours else _translated(name, value)
        option, remedy = _unsupported(ours)
        if option is None:
            if ours in kept or (ours != name and ours in given):
                raise OptionError(f"{name} is {ours} here, which is also given; give only one")
            kept[ours] = translated
        elif not has_no_effect(option, translated):
            raise OptionError(f"{name}={value!r} is not supported; {remedy}")
        elif name not in UNSUPPORTED_KEYWORDS and ANY in option.accepted and value is not False:
            ineffective.append(f"{name}={value!r}")
    if ineffective:
        _log.warning("without an effect here: %s", ", ".join(ineffective))
    if "enable_lora" in given:
        enabled = given["enable_lora"]
        if not isinstance(enabled, bool):
            raise OptionError(f"enable_lora={enabled!r} must be True or False")
        if adapters and not enabled:
            raise OptionError("enable_lora=False contradicts adapters=...; give only one")
        if enabled and not adapters:
            kept.setdefault("max_loras", DEFAULT_LORAS)
            kept.setdefault("max_lora_rank", DEFAULT_LORA_RANK)
    return kept


def speculation_of(config: Any) -> dict[str, Any]:
    """Return the options `speculation` and `draft` for vLLM's speculative_config. Raises OptionError for other methods
    than ngram and eagle3, and for unknown keys.
    """
    remedy = "use speculation='auto' or a number, and draft=DIR for an EAGLE-3 head"
    known = config if isinstance(config, Mapping) else {}
    for key in known:
        if key not in _SPECULATIVE_KEYS:
            raise OptionError(f"{str(key)[:80]!r} is not supported; {remedy}")
    model, number = known.get("model"), known.get("num_speculative_tokens")
    method = known.get("method") or ("ngram" if model in ("ngram", "[ngram]") else None)
    found = {"speculation": "auto" if number is None else number}
    if not is_speculation(found["speculation"]):
        raise OptionError(f"num_speculative_tokens={number!r} must be from 1 to {MAX_DRAFTS}")
    if method == "ngram":
        return found
    if method == "eagle3" and isinstance(model, str):
        return found | {"draft": model}
    raise OptionError(f"its method is not supported; {remedy}")


def _translated(name: str, value: Any) -> tuple[str, Any]:
    """Return a keyword's name here and its value; both unchanged if it has no other name.

    Raises OptionError for a name of a parameter of `LLM` that is no keyword, and of a flag of the server alone.
    """
    target = read_flags()[0].get(_flag(name), "")
    ours = target.removeprefix("--").replace("-", "_")
    if target.startswith("--no-") and isinstance(value, bool):
        positive = ours.removeprefix("no_")
        return (positive if positive in keywords() else f"enable_{positive}"), not value
    if ours in keywords() or ours in UNSUPPORTED_KEYWORDS or not target:
        return (ours or name), value
    if ours in _PARAMETERS:
        raise OptionError(f"{name} is {_PARAMETERS[ours]} here")
    raise OptionError(f"{name} is a flag of `sidestream serve`: {target}")


def _unsupported(name: str) -> tuple[Unsupported | None, str]:
    """Return the entry of an unsupported keyword with its remedy in Python's spelling; None for others."""
    if name in UNSUPPORTED_KEYWORDS:
        return UNSUPPORTED_KEYWORDS[name], UNSUPPORTED_KEYWORDS[name].remedy
    flag = None if name in keywords(private=True) else read_flags()[1].get(_flag(name))
    return (None, "") if flag is None else (flag.unsupported, with_keywords(flag.unsupported.remedy))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
