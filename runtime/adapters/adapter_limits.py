"""Limits of an engine's adapters: number of slots, LoRA rank and target projections."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...compiler.options import OptionError
from ...graphs.adapter import Describe
from ...graphs.adapter_config import MAX_RANK
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import read_eagle_config
from ...graphs.families import EXPERT_TARGETS
from ...graphs.lora import LoraShape
from ...graphs.lora_stacks import lora_shape_for
from ..engine.options import DEFAULT_MAX_LORAS, PROJECTIONS, EngineOptions
from .disk_cache import AdapterDiskCache
from .registry import AdapterRegistry

EXPERT_MEMORY = 0.2
"""Largest share of a GPU's memory for expert stacks if `max_loras` is not given."""


def make_registry(
    config: LlamaConfig, options: EngineOptions, describe: Describe, base: Path | None
) -> AdapterRegistry:
    """Return an empty registry for an engine. `base`: see AdapterRegistry."""
    return AdapterRegistry(
        config,
        max_rank(config, options.max_lora_rank),
        keep=options.max_cpu_loras,
        disk_cache=AdapterDiskCache.from_environment(),
        lenient=options.lora_lenient,
        describe=describe,
        draft=None if options.draft is None else read_eagle_config(options.draft).fitted(config),
        base=base,
    )


def max_rank(config: LlamaConfig, max_lora_rank: int | None) -> int:
    """Return the largest rank of an adapter's tensors: on experts it may be above `max_lora_rank`."""
    return MAX_RANK if config.num_experts else max_lora_rank or MAX_RANK


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
    targets = model_targets(registry.config, options.lora_targets, bool(registry.numbers))
    limits = slots, options.max_lora_rank, targets, options.lora_parts, options.max_expert_rank
    for name, number in registry.numbers.items():
        try:
            lora_shape_for([registry.by_number(number).adapter], *limits)
        except ValueError as error:
            raise OptionError(f"adapter {name!r}: {error}") from None
    return lora_shape_for(registry.adapters, *limits)


def model_targets(config: LlamaConfig, named: Sequence[str] | None, has_adapters: bool) -> Sequence[str] | None:
    """Return the targets that `named` means for a model: all projections include its experts; None: the adapters'.

    Raises OptionError for targets of experts if the model has none.
    """
    if not config.num_experts:
        wrong = [name for name in named or () if name in EXPERT_TARGETS]
        if wrong:
            raise OptionError(
                f"lora_target_modules names {', '.join(wrong)}, but the model has no experts; leave these names out"
            )
        return named
    if named is None and has_adapters:
        return None
    named = named or PROJECTIONS
    return (*named, *EXPERT_TARGETS) if set(PROJECTIONS) <= set(named) else named


def expert_slot_bytes(lora: LoraShape, config: LlamaConfig, element_bytes: int) -> int:
    """Return the bytes of a slot's expert stacks, without the scales of eight bits."""
    columns = {"experts_gate_up": 2 * (config.hidden_size + config.expert_intermediate_size)}
    columns["experts_down"] = config.hidden_size + config.expert_intermediate_size
    per_expert = lora.expert_rank * sum(size for name, size in columns.items() if name in lora.targets)
    return config.num_sparse_layers * config.num_experts * per_expert * element_bytes


def slots_within(memory: int, lora: LoraShape, config: LlamaConfig, element_bytes: int) -> int:
    """Return the number of slots whose expert stacks have a share EXPERT_MEMORY of `memory`: `lora.slots` or fewer, at
    least one.
    """
    slot = expert_slot_bytes(lora, config, element_bytes)
    return max(1, min(lora.slots, int(EXPERT_MEMORY * memory) // max(1, slot)))


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
