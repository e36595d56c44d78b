"""Adapters as slots of the stacks that the graph reads: A and B padded to the stack's rank, with alpha / rank in B;
gains of DoRA (arXiv 2402.09353) and IA3, and shifts of biases, which depend on the base's weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from .adapter import Adapter
from .adapter_config import AdapterError
from .config import LlamaConfig
from .families import EXPERT_TARGETS, VOCABULARY_TARGETS
from .ia3 import BIASED_FACTORS, FACTORS
from .lora import PROJECTION_STACKS, RANK_MULTIPLE, TARGETS, LoraShape
from .moe.adapter_layouts import LINEARS, graph_modules, is_stack, target_of

_KINDS = {
    "dora": "the adapter has magnitudes (DoRA)",
    "ia3": "the adapter has IA3's factors",
    "bias": "the adapter has trained biases, or IA3's factors of biases",
}
Lookup = Callable[[str], torch.Tensor]
"""Returns a tensor of the checkpoint by its name, with the graph's head layout."""
CPU = torch.device("cpu")
ROWS_AT_ONCE = 512  # of a weight in fp64: 56 MiB for 14,336 columns


def lora_shape_for(
    adapters: Iterable[Adapter],
    max_loras: int,
    max_lora_rank: int | None = None,
    target_modules: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    max_expert_rank: int | None = None,
) -> LoraShape | None:
    """Return the shape of stacks for `max_loras` adapters at the same time; None without adapters and max_lora_rank.

    The rank is `max_lora_rank` or the adapters' largest, padded to a multiple of 16. The targets are `target_modules`
    or those of the adapters (without adapters: all), with q/k/v and gate/up together. All projections in
    `target_modules` include the embedding, the output head, routers and experts if an adapter changes these. `parts`:
    default: those of the adapters. The rank of experts is `max_expert_rank`, the adapters' largest there, or the rank,
    padded likewise. Raises ValueError for an adapter that does not fit.
    """
    given = list(adapters)
    if not given and max_lora_rank is None:
        return None
    rank = max_lora_rank or max(adapter.rank for adapter in given) or RANK_MULTIPLE
    expert_rank = max_expert_rank or max((adapter.expert_rank for adapter in given), default=0)
    changed = {name for adapter in given for name in adapter.targets}
    targets = list(target_modules or [name for name in TARGETS if name in changed])
    if not target_modules or set(TARGETS) <= set(targets):
        targets += [name for name in (*VOCABULARY_TARGETS, *EXPERT_TARGETS) if name in changed]
    chosen = [part for adapter in given for part in adapter.kinds] if parts is None else parts
    padded, expert_padded = (-(-each // RANK_MULTIPLE) * RANK_MULTIPLE for each in (rank, expert_rank))
    if not set(targets) & set(LINEARS):
        expert_padded = 0
    shape = LoraShape(max_loras, padded, tuple(targets or TARGETS), tuple(chosen), expert_padded)
    for adapter in given:
        if adapter.rank > rank:
            raise ValueError(f"an adapter has rank {adapter.rank}, above max_lora_rank {rank}: raise max_lora_rank")
        if adapter.expert_rank > (max_expert_rank or adapter.expert_rank):
            raise ValueError(
                f"an adapter has rank {adapter.expert_rank} on experts, above max_expert_rank {max_expert_rank}: raise "
                "max_expert_rank"
            )
        check_fits(adapter, shape)
    return shape


def check_fits(adapter: Adapter, lora: LoraShape) -> None:
    """Raise ValueError when the stacks lack an adapter's parts, or are too small for its rank and its targets."""
    absent = [part for part in adapter.kinds if PROJECTION_STACKS[part] not in lora.stacks]
    if absent:
        wanted = [*lora.parts, *absent]
        raise ValueError(
            f"{_KINDS[absent[0]]}, and the engine was started without such adapters: start with --lora-parts "
            f"{' '.join(wanted)} (lora_parts={wanted} in Python), or pass the adapter when the engine starts"
        )
    missing = [name for name in adapter.targets if name not in lora.targets]
    if adapter.rank > lora.rank or missing:
        raise ValueError(
            f"an adapter of rank {adapter.rank or adapter.expert_rank} on {', '.join(adapter.targets)} does not fit "
            f"stacks of rank {lora.rank} on {', '.join(lora.targets)}: raise max_lora_rank, add its projections to "
            "lora_target_modules, or pass the adapter when the engine starts"
        )
    if adapter.expert_rank > lora.expert_rank:
        raise ValueError(
            f"an adapter of rank {adapter.expert_rank} on experts does not fit stacks of experts of rank "
            f"{lora.expert_rank}: raise max_expert_rank, or pass the adapter when the engine starts"
        )


def resolved(
    adapter: Adapter,
    lookup: Lookup,
    device: torch.device | None = None,
    device_calls: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> Adapter:
    """Return an adapter whose parts are stacks: `lora_gain` and `lora_shift`, fp32 [N], and B times DoRA's factor.

    IA3 gives y = l * (W x + bias): the gain is l - 1, the shift (l - 1) * bias. DoRA gives
    y = g * (W x) + g * s * B A x + bias, with g_i = m_i / ||W_i + s B_i A||: the gain is g - 1. Other shifts: s times
    the bias of B; a trained bias less the base's. The norms are computed in fp64 from the checkpoint's weights, to
    which the magnitudes were trained, on `device` and in pieces, each within `device_calls`. Raises AdapterError for a
    norm of zero.
    """
    if not adapter.parts:
        return adapter
    tensors, parts = dict(adapter.tensors), {}
    for module, kinds in adapter.parts.items():
        stacks: dict[str, torch.Tensor] = {}
        if "magnitude" in kinds:
            factor = _factor(adapter, module, lookup, device, device_calls)
            a, b = tensors[module]
            tensors[module] = a, (b.double() * factor.unsqueeze(1)).float()
            stacks["lora_gain"] = (factor - 1.0).float()
        if "lora_bias" in kinds:
            stacks["lora_shift"] = kinds["lora_bias"] * adapter.scaling[module]
        if "bias" in kinds:
            change = kinds["bias"] - lookup(f"{module}.bias").float().cpu()
            stacks["lora_shift"] = stacks["lora_shift"] + change if "lora_shift" in stacks else change
        for kind in kinds.keys() & {FACTORS, BIASED_FACTORS}:
            stacks["lora_gain"] = kinds[kind] - 1.0
            if kind == BIASED_FACTORS:
                stacks["lora_shift"] = stacks["lora_gain"] * lookup(f"{module}.bias").float().cpu()
        parts[module] = stacks
    return replace(adapter, tensors=tensors, parts=parts)


def _factor(
    adapter: Adapter,
    module: str,
    lookup: Lookup,
    device: torch.device | None,
    device_calls: AbstractContextManager[Any],
) -> torch.Tensor:
    """Return DoRA's factor of each output, fp64 [N]; 1 for the padding of heads."""
    magnitude = adapter.parts[module]["magnitude"].double()
    norms = weight_norms(module, *adapter.tensors[module], adapter.scaling[module], lookup, device, device_calls)
    padding = (magnitude == 0) & (norms == 0)
    factor = torch.where(padding, 1.0, magnitude / norms)
    if not bool(torch.isfinite(factor.float()).all()):
        row = int((~torch.isfinite(factor.float())).nonzero()[0])
        raise AdapterError(
            f"{module}: the norm of row {row} of the base's weight with LoRA is {norms[row]:g}, so that its magnitude "
            f"{magnitude[row]:g} cannot be reached: the adapter was trained on another base; use that one"
        )
    return factor


def weight_norms(
    module: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    lookup: Lookup,
    device: torch.device | None = None,
    device_calls: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> torch.Tensor:
    """Return ||W_i + scaling * B_i A|| of each row i, fp64 [N], for a [r, K] and b [N, r]; see `resolved`."""
    weight = lookup(f"{module}.weight")
    scales = lookup(f"{module}.weight_scale") if weight.element_size() == 1 else None  # stored in eight bits
    norms = torch.empty(len(b), dtype=torch.float64)
    with device_calls:
        wide_a = a.to(device).double() * scaling
    for first in range(0, len(b), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        with device_calls:
            rows = weight[part].to(device).double()
            if scales is not None:
                rows *= scales[part].to(device).double()
            norms[part] = rows.addmm_(b[part].to(device).double(), wide_a).square_().sum(1).sqrt().cpu()
    return norms


def slot_tensors(
    adapter: Adapter, config: LlamaConfig, lora: LoraShape, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Return name -> the adapter's slot of every stack, zero-padded.

    Names are `model.layers.0.self_attn.q_proj.lora_a`, with [R, K], `...lora_b`, with [N, R], and for parts
    `...lora_gain` and `...lora_shift`, with [N] in fp32. A of the embedding is [V, R]: a token reads one row. Stacks of
    experts have [E, n * R, K] and [E, N, R], for n projections with rows of their own in A. B is scaled in fp32 before
    it is rounded to `dtype`. An adapter with parts must be `resolved`. Raises ValueError when the adapter does not fit
    into `lora`.
    """
    check_fits(adapter, lora)
    modules = [module for module in config.linear_modules() if module.rpartition(".")[2] in lora.targets]
    names = [f"{module}.{side}" for module in modules for side in lora.stacks]
    others = [each for each in (*config.vocabulary_modules, *graph_modules(config)) if target_of(each) in lora.targets]
    names += [f"{module}.{side}" for module in others for side in ("lora_a", "lora_b")]
    return {name: slot_tensor(adapter, config, lora, name, dtype) for name in names}


def slot_tensor(
    adapter: Adapter,
    config: LlamaConfig,
    lora: LoraShape,
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Return the entry `name` of `slot_tensors`, computed on `device`. It may be the adapter's own tensor, so do not
    write to it.
    """
    return slot_stack(adapter, config, lora, [name], dtype, device)[0]


def slot_stack(
    adapter: Adapter,
    config: LlamaConfig,
    lora: LoraShape,
    names: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Return [len(names), ...]: entries of `slot_tensors` that differ in their layer only, see `slot_tensor`.

    Equal layers are computed together. They are sent to a GPU in one copy from pinned memory.
    """
    modules, side = [name.rpartition(".")[0] for name in names], names[0].rpartition(".")[2]
    module = modules[0]
    if len(names) > 1 and not _are_alike(adapter, modules, side):
        return torch.stack([slot_tensor(adapter, config, lora, name, dtype, device) for name in names])
    if is_stack(module):
        return _expert_slot(adapter, config, lora, module, side, dtype, device).unsqueeze(0)
    outputs, inputs = config.module_shape(module)
    if side in PROJECTION_STACKS.values():
        vector = adapter.parts.get(module, {}).get(side)
        found = torch.zeros(outputs, device=device) if vector is None else vector.to(device, non_blocking=True)
        return found.unsqueeze(0)
    turned = side == "lora_a" and module in config.vocabulary_modules[:1]
    shape = (inputs, lora.rank) if turned else (lora.rank, inputs) if side == "lora_a" else (outputs, lora.rank)
    if module not in adapter.tensors:
        return torch.zeros((1, *shape), dtype=dtype, device=device)
    values = _stacked([adapter.tensors[each][side == "lora_b"] for each in modules], device)
    if side == "lora_b":
        if values.dtype != dtype:
            values = values.to(torch.float32)  # else the product is also computed in fp32 and rounded once
        values = values * adapter.scaling[module]
    tensors = (values.mT if turned else values).to(dtype)
    if tensors.shape[1:] == shape:
        return tensors.contiguous()
    padded = torch.zeros((len(names), *shape), dtype=dtype, device=device)
    padded[:, : tensors.shape[1], : tensors.shape[2]] = tensors
    return padded


def _are_alike(adapter: Adapter, modules: Sequence[str], side: str) -> bool:
    """Return whether A or B of these modules have one shape, dtype and scaling, and are in host memory."""
    if (
        is_stack(modules[0])
        or side in PROJECTION_STACKS.values()
        or any(each not in adapter.tensors for each in modules)
    ):
        return False
    tensors = [adapter.tensors[each][side == "lora_b"] for each in modules]
    kinds = {
        (tensor.shape, tensor.dtype, tensor.device, adapter.scaling[each])
        for each, tensor in zip(modules, tensors, strict=True)
    }
    return len(kinds) == 1 and tensors[0].device == CPU


def _stacked(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return equal tensors as one on `device`, a single one without a copy on the CPU."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0).to(device, non_blocking=True)
    shape, pinned = (len(tensors), *first.shape), device.type == "cuda"
    together = torch.empty(shape, dtype=first.dtype, pin_memory=pinned)
    return torch.stack(list(tensors), out=together).to(device, non_blocking=True)


def _expert_slot(
    adapter: Adapter,
    config: LlamaConfig,
    lora: LoraShape,
    stack: str,
    side: str,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return A [E, n * R, K] or B [E, N, R] of a stack of experts, see `slot_tensors`."""
    (outputs, inputs), experts, rank = config.module_shape(stack), config.num_experts, lora.expert_rank
    linears = LINEARS[target_of(stack)]
    width = outputs // len(linears)
    shape = (experts, len(linears) * rank, inputs) if side == "lora_a" else (experts, outputs, rank)
    slot = torch.zeros(shape, dtype=dtype, device=device)
    for index, linear in enumerate(linears):
        rows = slice(index * width, (index + 1) * width)
        for chosen, a, b, scaling in _expert_tensors(adapter, experts, stack, linear, rows):
            if side == "lora_a":
                slot[chosen, index * rank : index * rank + a.shape[1]] = a.to(device, non_blocking=True).to(dtype)
            else:
                scale = scaling.to(device) if isinstance(scaling, torch.Tensor) else scaling
                slot[chosen, rows, : b.shape[2]] = (b.to(device, non_blocking=True).to(torch.float32) * scale).to(dtype)
    return slot


def _expert_tensors(
    adapter: Adapter, experts: int, stack: str, linear: str, rows: slice
) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, Any]]:
    """Yield (index of experts, A [e, r, K], B [e, N, r], scaling) of one projection; its `rows` in the stack."""
    if stack in adapter.tensors:
        a, b = adapter.tensors[stack]
        yield slice(None), a, b[:, rows], adapter.scaling[stack]
    home = stack.rpartition(".")[0]
    alike: dict[Any, dict[int, str]] = {}  # few large operations: the thread that launches steps needs the GIL
    for expert in range(experts):
        module = f"{home}.{expert}.{linear}"
        if module in adapter.tensors:
            a, b = adapter.tensors[module]
            alike.setdefault((a.shape[0], a.dtype, b.dtype), {})[expert] = module
    for modules in alike.values():
        pairs = [adapter.tensors[module] for module in modules.values()]
        scaling = torch.tensor([adapter.scaling[module] for module in modules.values()]).view(-1, 1, 1)
        yield list(modules), torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]), scaling


def fill_slot(model: torch.nn.Module, slot: int, tensors: dict[str, torch.Tensor] | None) -> None:
    """Copy `slot_tensors` into slot `slot` of a plain Llama's stacks (for eager runs); None clears the slot."""
    with torch.no_grad():
        for name, stack in model.named_buffers():
            if name.rpartition(".")[2].startswith("lora_"):
                stack[slot] = 0.0
                if tensors is not None:
                    stack[slot].copy_(tensors[name])
