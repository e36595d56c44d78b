"""`quantization_config`: checkpoints with projections stored in eight bits by llm-compressor (compressed-tensors).

W8A8 in int8 and FP8-dynamic are supported: weights with one scale per output channel, which are used unchanged, and
activations with one scale per token. Projections in `ignore` have 16 bits. This file does not import torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .config_fields import ConfigError
from .families import EXPERT_SPELLINGS, PACKED_MODULES
from .peft_patterns import PatternError, PeftPatterns

FILE_DTYPES = {"int8": "I8", "fp8": "F8_E4M3"}  # as safetensors spells them
_FLOATING = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_FORMATS = {"int-quantized": ("int8", "int"), "float-quantized": ("fp8", "float")}
_HEAD = "lm_head"
_PATTERN = "re:"
_REMEDY = "use the original checkpoint in bf16; Sidestream quantizes it at load time"


def stored_dtype(directory: Path) -> str | None:
    """Return the dtype of a checkpoint's first floating-point tensor; None without readable weights.

    transformers uses it for a config.json without a dtype.
    """
    single = directory / "model.safetensors"
    for path in [single] if single.exists() else sorted(directory.glob("model*.safetensors"))[:1]:
        try:
            with safe_open(str(path), framework="numpy") as file:
                found = (_FLOATING.get(file.get_slice(name).get_dtype()) for name in file.keys())  # noqa: SIM118
                return next((dtype for dtype in found if dtype), None)
        except (OSError, SafetensorError, ValueError):
            return None
    return None


def stored_format(fields: Mapping[str, Any]) -> str:
    """Return the format of a checkpoint's projections: "int8", "fp8", or "" for 16 or 32 bits.

    Raises ConfigError for any other quantization.
    """
    config = fields.get("quantization_config")
    if not config:
        return ""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or method != "compressed-tensors":
        blocks = config.get("weight_block_size") if isinstance(config, Mapping) else None
        name = f"{method!r}" + (f" (one scale for each block of {blocks})" if blocks else "")
        raise ConfigError(
            f"quantization_config: quant_method {name} is not supported, only compressed-tensors: {_REMEDY}"
        )
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    known = _FORMATS.get(str(config.get("format")))
    if known is None or not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise ConfigError(
            f"quantization_config: format {config.get('format')!r} is not supported, only int-quantized and "
            f"float-quantized with one group for all linear layers: {_REMEDY}"
        )
    name, kind = known
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    _expect(group.get("weights"), "weights", {**both, "strategy": "channel", "dynamic": False})
    _expect(group.get("input_activations"), "input_activations", {**both, "strategy": "token", "dynamic": True})
    for part in ("output_activations", "kv_cache_scheme"):
        if group.get(part) or config.get(part):
            raise ConfigError(f"quantization_config: {part} is set, which is not supported: {_REMEDY}")
    if not fields.get("tie_word_embeddings") and not _ignored(config, [_HEAD]):
        raise ConfigError(
            f"quantization_config: ignore does not list {_HEAD}, but a head in eight bits is not supported: {_REMEDY}"
        )
    return name


def modules_in_16_bits(fields: Mapping[str, Any], modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of `modules` (full names in the checkpoint) that `ignore` leaves in 16 bits, in order.

    Raises ConfigError if `ignore` lists only some of the projections of one GEMM.
    """
    modules = list(modules)
    found = _ignored(fields["quantization_config"], modules)
    for group in PACKED_MODULES.values():
        for module in modules:
            home, _, name = module.rpartition(".")
            plain = [part for part in group if f"{home}.{part}" in found]
            if name == group[0] and 0 < len(plain) < len(group):
                raise ConfigError(
                    f"quantization_config: ignore leaves {plain[0]} of {home} in 16 bits, but not all of "
                    f"{', '.join(group)}, which are computed together: {_REMEDY}"
                )
    return tuple(module for module in modules if module in found)


def experts_in_16_bits(fields: Mapping[str, Any], layers: Iterable[int], experts: int) -> tuple[str, ...]:
    """Return the full names of the experts' weights in the graph that `ignore` leaves in 16 bits, for sparse `layers`.

    Raises ConfigError if `ignore` lists only some of a layer's experts, or only their gate or up.
    """
    spelled: dict[str, list[str]] = {}
    for layer in layers:
        for home, (*gate_up, down) in EXPERT_SPELLINGS:
            for weight, names in (("gate_up_proj", gate_up), ("down_proj", [down])):
                stored = f"model.layers.{layer}.{home}.experts"
                modules = spelled.setdefault(f"model.layers.{layer}.mlp.experts.{weight}", [])
                modules += [f"{stored}.{expert}.{name}" for expert in range(experts) for name in names]
    found = _ignored(fields["quantization_config"], [name for modules in spelled.values() for name in modules])
    plain = []
    for weight, modules in spelled.items():
        halves = modules[: len(modules) // 2], modules[len(modules) // 2 :]  # one for each spelling
        for half in halves:
            listed = [name for name in half if name in found]
            if 0 < len(listed) < len(half):
                other = next(name for name in half if name not in found)
                raise ConfigError(
                    f"quantization_config: ignore leaves {listed[0]} in 16 bits, but not {other}; all experts of a "
                    f"layer are computed together: {_REMEDY}"
                )
        if any(half[0] in found for half in halves):
            plain.append(weight)
    return tuple(plain)


def _ignored(config: Mapping[str, Any], modules: Iterable[str]) -> frozenset[str]:
    """Return those of `modules` that `ignore` lists, by full name or by a pattern that matches from the start.

    Entries that match no module are ignored.
    """
    entries = config.get("ignore", [_HEAD])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"quantization_config: ignore must be a list of names, not {entries!r}: correct config.json")
    names = {entry for entry in entries if not entry.startswith(_PATTERN)}
    patterns = PeftPatterns()  # the file is untrusted: RE2 matches in linear time
    try:
        compiled = [patterns.compile(entry.removeprefix(_PATTERN)) for entry in entries if entry.startswith(_PATTERN)]
    except PatternError as problem:
        raise ConfigError(f"quantization_config: ignore: {problem}") from None
    return frozenset(each for each in modules if each in names or any(pattern.match(each) for pattern in compiled))


def _expect(found: Any, part: str, wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        given = found.get(name) if isinstance(found, Mapping) else None
        if given != value:
            raise ConfigError(f"quantization_config: {name} of {part} must be {value!r}, not {given!r}: {_REMEDY}")
