"""Adapters as slots of the stacks that the graph reads: A and B padded to the stack's rank, with alpha / rank in B."""

from collections.abc import Iterable, Sequence

import torch

from .adapter import Adapter
from .config import LlamaConfig
from .families import VOCABULARY_TARGETS
from .lora import PROJECTION_STACKS, RANK_MULTIPLE, TARGETS, LoraShape

_KINDS = {"dora": "the adapter has magnitudes (DoRA)", "bias": "the adapter has trained biases"}


def lora_shape_for(
    adapters: Iterable[Adapter],
    max_loras: int,
    max_lora_rank: int | None = None,
    target_modules: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
) -> LoraShape | None:
    """Return the shape of stacks for `max_loras` adapters at the same time; None without adapters and max_lora_rank.

    The rank is `max_lora_rank` or the adapters' largest, padded to a multiple of 16. The targets are `target_modules`
    or those of the adapters (without adapters: all), with q/k/v and gate/up together. All projections in
    `target_modules` include the embedding and the output head if an adapter changes these. `parts`: default: those of
    the adapters. Raises ValueError for an adapter that does not fit.
    """
    given = list(adapters)
    if not given and max_lora_rank is None:
        return None
    rank = max_lora_rank or max(adapter.rank for adapter in given)
    changed = {name for adapter in given for name in adapter.targets}
    targets = list(target_modules or [name for name in TARGETS if name in changed])
    if not target_modules or set(TARGETS) <= set(targets):
        targets += [name for name in VOCABULARY_TARGETS if name in changed]
    chosen = [part for adapter in given for part in adapter.kinds] if parts is None else parts
    shape = LoraShape(max_loras, -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE, tuple(targets or TARGETS), tuple(chosen))
    for adapter in given:
        if adapter.rank > rank:
            raise ValueError(f"an adapter has rank {adapter.rank}, above max_lora_rank {rank}: raise max_lora_rank")
        check_fits(adapter, shape)
    return shape


def check_fits(adapter: Adapter, lora: LoraShape) -> None:
    """Raise ValueError when the stacks lack an adapter's parts, or are too small for its rank and its targets."""
    for part in adapter.kinds:
        if part not in lora.parts:
            wanted = " ".join([*lora.parts, part])
            raise ValueError(
                f"{_KINDS[part]}, and the engine was started without such adapters: start with --lora-parts {wanted} "
                f"(lora_parts={wanted.split()} in Python), or pass the adapter when the engine starts"
            )
    missing = [name for name in adapter.targets if name not in lora.targets]
    if adapter.rank > lora.rank or missing:
        raise ValueError(
            f"an adapter of rank {adapter.rank} on {', '.join(adapter.targets)} does not fit stacks of rank "
            f"{lora.rank} on {', '.join(lora.targets)}: raise max_lora_rank, add its projections to "
            "lora_target_modules, or pass the adapter when the engine starts"
        )


def slot_tensors(
    adapter: Adapter, config: LlamaConfig, lora: LoraShape, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Return name -> the adapter's slot of every stack, zero-padded.

    Names are `model.layers.0.self_attn.q_proj.lora_a`, with [R, K], `...lora_b`, with [N, R], and for parts
    `...lora_gain` and `...lora_shift`, with [N] in fp32. A of the embedding is [V, R]: a token reads one row. B is
    scaled in fp32 before it is rounded to `dtype`. An adapter with parts must be `dora.resolved`. Raises ValueError
    when the adapter does not fit into `lora`.
    """
    check_fits(adapter, lora)
    modules = [module for module in config.linear_modules() if module.rpartition(".")[2] in lora.targets]
    names = [f"{module}.{side}" for module in modules for side in lora.stacks]
    vocabulary = [module for module in config.vocabulary_modules if module.rpartition(".")[2] in lora.targets]
    names += [f"{module}.{side}" for module in vocabulary for side in ("lora_a", "lora_b")]
    return {name: slot_tensor(adapter, config, lora, name, dtype) for name in names}


def slot_tensor(
    adapter: Adapter, config: LlamaConfig, lora: LoraShape, name: str, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return the entry `name` of `slot_tensors`. It may be the adapter's own tensor, so do not write to it."""
    module, _, side = name.rpartition(".")
    outputs, inputs = config.module_shape(module)
    if side in PROJECTION_STACKS.values():
        vector = adapter.parts.get(module, {}).get(side)
        return torch.zeros(outputs) if vector is None else vector
    turned = side == "lora_a" and module in config.vocabulary_modules[:1]
    shape = (inputs, lora.rank) if turned else (lora.rank, inputs) if side == "lora_a" else (outputs, lora.rank)
    if module not in adapter.tensors:
        return torch.zeros(shape, dtype=dtype)
    a, b = adapter.tensors[module]
    a = a.T if turned else a
    tensor = a.to(dtype) if side == "lora_a" else (b.to(torch.float32) * adapter.scaling[module]).to(dtype)
    if tensor.shape == shape:
        return tensor.contiguous()
    padded = torch.zeros(shape, dtype=dtype)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor
    return padded


def fill_slot(model: torch.nn.Module, slot: int, tensors: dict[str, torch.Tensor] | None) -> None:
    """Copy `slot_tensors` into slot `slot` of a plain Llama's stacks (for eager runs); None clears the slot."""
    with torch.no_grad():
        for name, stack in model.named_buffers():
            if name.rpartition(".")[2].startswith("lora_"):
                stack[slot] = 0.0
                if tensors is not None:
                    stack[slot].copy_(tensors[name])
