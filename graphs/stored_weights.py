"""`quantization_config`: checkpoints whose projections are stored in eight bits already, as llm-compressor writes them
(compressed-tensors): W8A8 in int8, and FP8-dynamic. One scale for each output channel, activations quantized by token
at run time; such weights are served as they are. Needs no torch: a process without it reads configs.
"""

from collections.abc import Mapping
from typing import Any

from .config_fields import ConfigError

FILE_DTYPES = {"int8": "I8", "fp8": "F8_E4M3"}  # as safetensors spells them
_FORMATS = {"int-quantized": ("int8", "int"), "float-quantized": ("fp8", "float")}
_REMEDY = "use the bf16 original, Sidestream quantizes it while loading"


def stored_format(fields: Mapping[str, Any]) -> str:
    """ "int8" or "fp8" for a checkpoint that is stored like that, "" for one in 16 or 32 bits. Raises ConfigError for
    every other way in which weights can be quantized.
    """
    config = fields.get("quantization_config")
    if not config:
        return ""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or method != "compressed-tensors":
        raise ConfigError(
            f"quantization_config: quant_method {method!r} is not served (compressed-tensors is): {_REMEDY}"
        )
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    known = _FORMATS.get(str(config.get("format")))
    if known is None or not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise ConfigError(
            f"quantization_config: format {config.get('format')!r} is not served; int-quantized and float-quantized "
            f"are, with one group for all linear layers: {_REMEDY}"
        )
    name, kind = known
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    _expect(group.get("weights"), "weights", {**both, "strategy": "channel", "dynamic": False})
    _expect(group.get("input_activations"), "input_activations", {**both, "strategy": "token", "dynamic": True})
    for part in ("output_activations", "kv_cache_scheme"):
        if group.get(part) or config.get(part):
            raise ConfigError(f"quantization_config: {part} is set, which is not served: {_REMEDY}")
    if config.get("ignore", ["lm_head"]) != ["lm_head"]:
        raise ConfigError(f"quantization_config: ignore must be ['lm_head'], not {config['ignore']!r}: {_REMEDY}")
    return name


def _expect(found: Any, part: str, wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        given = found.get(name) if isinstance(found, Mapping) else None
        if given != value:
            raise ConfigError(f"quantization_config: {name} of {part} must be {value!r}, not {given!r}: {_REMEDY}")
