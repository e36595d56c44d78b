"""Which adapters an engine has room for: how many at once, of which rank, on which projections."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...compiler.options import OptionError
from ...graphs.adapter import Describe
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import read_eagle_config
from ...graphs.lora import LoraShape
from ...graphs.stack import lora_shape_for
from ..engine.options import DEFAULT_MAX_LORAS, MAX_RANK, EngineOptions
from .disk_cache import SlotCache
from .registry import AdapterRegistry


def registry_of(config: LlamaConfig, options: EngineOptions, describe: Describe) -> AdapterRegistry:
    """A registry of an engine's adapters, without any."""
    return AdapterRegistry(
        config,
        options.max_lora_rank or MAX_RANK,
        keep=options.max_cpu_loras,
        cache=SlotCache.from_environment(),
        lenient=options.lora_lenient,
        describe=describe,
        draft=None if options.draft is None else read_eagle_config(options.draft).fitted(config),
    )


def num_slots(options: EngineOptions, adapters: int) -> int:
    """How many adapters are resident at once, of so many at the start. Raises OptionError."""
    slots = min(adapters, DEFAULT_MAX_LORAS) if options.max_loras is None else options.max_loras
    if slots == 0 and adapters:
        raise OptionError(
            f"max_loras=0 leaves no room for the {adapters} adapters given; raise max_loras or leave adapters out"
        )
    if slots and not adapters and options.max_lora_rank is None:
        raise OptionError(
            f"max_loras={slots} without adapters: the shape of the stacks follows from them; give at least one "
            "in adapters={name: path}, or max_lora_rank"
        )
    return slots


def lora_shape(registry: AdapterRegistry, slots: int, options: EngineOptions) -> LoraShape | None:
    """Stacks for the adapters that are known, and for those that the options leave room for. Raises OptionError for a
    known one that does not fit.
    """
    rank, targets = options.max_lora_rank, options.lora_targets
    for name, number in registry.numbers.items():
        try:
            lora_shape_for([registry.by_number(number).adapter], slots, rank, targets)
        except ValueError as problem:
            raise OptionError(f"adapter {name!r}: {problem}") from None
    return lora_shape_for(registry.adapters, slots, rank, targets)


def draft_lora_shape(registry: AdapterRegistry, slots: int, max_lora_rank: int | None) -> LoraShape | None:
    """The same for their LoRAs of the draft; None where no adapter that is known has one."""
    drafts = [each.draft for each in registry.adapters if each.draft is not None]
    if registry.draft is None or (registry.numbers and not drafts):
        return None
    return lora_shape_for(drafts, slots, max_lora_rank)


def readable_adapters(
    config: LlamaConfig, adapters: Mapping[str, str | Path], options: EngineOptions, describe: Describe
) -> tuple[dict[str, str | Path], dict[str, Exception]]:
    """(Those that can be served, why the others can't). `options` say all of the stacks' shape: `max_loras`,
    `max_lora_rank` and `lora_target_modules`.
    """
    registry = registry_of(config, replace(options, max_cpu_loras=1), describe)
    registry.lora = lora_shape(registry, options.max_loras or 1, options)
    registry.draft_lora = draft_lora_shape(registry, options.max_loras or 1, options.max_lora_rank)
    refused: dict[str, Exception] = {}
    for known in registry.add_all(adapters, refused):
        registry.let_go(known.number)
    return {name: path for name, path in adapters.items() if name not in refused}, refused
