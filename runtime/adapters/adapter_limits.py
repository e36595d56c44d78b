"""Limits of an engine's adapters: number of slots, LoRA rank and target projections."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...compiler.options import OptionError
from ...graphs.adapter import Describe
from ...graphs.adapter_config import MAX_RANK
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import read_eagle_config
from ...graphs.lora import LoraShape
from ...graphs.lora_stacks import lora_shape_for
from ..engine.options import DEFAULT_MAX_LORAS, EngineOptions
from .disk_cache import AdapterDiskCache
from .registry import AdapterRegistry


def make_registry(
    config: LlamaConfig, options: EngineOptions, describe: Describe, base: Path | None
) -> AdapterRegistry:
    """Return an empty registry for an engine. `base`: see AdapterRegistry."""
    return AdapterRegistry(
        config,
        options.max_lora_rank or MAX_RANK,
        keep=options.max_cpu_loras,
        disk_cache=AdapterDiskCache.from_environment(),
        lenient=options.lora_lenient,
        describe=describe,
        draft=None if options.draft is None else read_eagle_config(options.draft).fitted(config),
        base=base,
    )


def num_slots(options: EngineOptions, num_adapters: int) -> int:
    """Return the number of GPU slots for an engine that starts with `num_adapters`. Raises OptionError."""
    slots = min(num_adapters, DEFAULT_MAX_LORAS) if options.max_loras is None else options.max_loras
    if slots == 0 and num_adapters:
        raise OptionError(
            f"max_loras=0 leaves no slot for the {num_adapters} adapters given; raise max_loras or leave adapters out"
        )
    if slots and not num_adapters and options.max_lora_rank is None:
        raise OptionError(
            f"max_loras={slots} without adapters: the stacks' shape is unknown; give at least one in "
            "adapters={name: path}, or max_lora_rank"
        )
    return slots


def lora_shape(registry: AdapterRegistry, slots: int, options: EngineOptions) -> LoraShape | None:
    """Return the stacks' shape. Raises OptionError for a registered adapter that does not fit."""
    rank, targets, parts = options.max_lora_rank, options.lora_targets, options.lora_parts
    for name, number in registry.numbers.items():
        try:
            lora_shape_for([registry.by_number(number).adapter], slots, rank, targets, parts)
        except ValueError as error:
            raise OptionError(f"adapter {name!r}: {error}") from None
    return lora_shape_for(registry.adapters, slots, rank, targets, parts)


def draft_lora_shape(registry: AdapterRegistry, slots: int, max_lora_rank: int | None) -> LoraShape | None:
    """Return the shape of stacks for LoRAs of the draft; None if no registered adapter has one."""
    drafts = [each.draft for each in registry.adapters if each.draft is not None]
    if registry.draft is None or (registry.numbers and not drafts):
        return None
    return lora_shape_for(drafts, slots, max_lora_rank)


def readable_adapters(
    config: LlamaConfig,
    adapters: Mapping[str, str | Path],
    options: EngineOptions,
    describe: Describe,
    base: Path | None,
) -> tuple[dict[str, str | Path], dict[str, Exception]]:
    """Return (adapters that can be served, errors of the others). `options` must set `max_loras`, `max_lora_rank`,
    `lora_target_modules` and `lora_parts`. `base`: directory of the model.
    """
    registry = make_registry(config, replace(options, max_cpu_loras=1), describe, base)
    registry.lora = lora_shape(registry, options.max_loras or 1, options)
    registry.draft_lora = draft_lora_shape(registry, options.max_loras or 1, options.max_lora_rank)
    rejected: dict[str, Exception] = {}
    for registered in registry.add_all(adapters, rejected):
        registry.discard_tensors(registered.number)
    return {name: path for name, path in adapters.items() if name not in rejected}, rejected
