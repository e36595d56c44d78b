"""Memory demand of an engine, and the number of KV pages that fit into the rest of the device's memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...compiler.options import CompileOptions, OptionError
from ...compiler.program.program import Program
from ...graphs.config import LlamaConfig
from ...ops.collectives.tensor_parallel_group import group_named, tensor_parallel_group
from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from ..api.errors import CapacityError
from ..engine.options import EngineOptions
from ..engine.resolve import EngineSizes
from ..scheduler.step_plan import RINGS

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
GIB = 1 << 30
CPU_KV_BYTES = GIB // 2
RESERVE_BYTES = 768 << 20  # kernels, CUDA graphs, split-K workspaces, the allocator's rounding
LOGPROB_BYTES = 24  # of a token in `top_logprobs` and in the step's samples
SAMPLING_COPIES = 4  # fp32 copies of the logits while sampling with penalties and logprobs


def nbytes(specs: Specs) -> int:
    """Return the bytes of all tensors of `specs`."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def specs_of(program: Program, kind: str) -> Specs:
    """Return shape and dtype of a program's buffers of one kind, by name."""
    return {buffer.name: (buffer.shape, buffer.dtype) for buffer in program.of_kind(kind)}


def expert_bytes(stacks: Specs) -> int:
    """Return the bytes of the experts' adapter stacks."""
    return nbytes({name: spec for name, spec in stacks.items() if "_experts_" in name})


def kv_specs(program: Program, pages: int) -> Specs:
    """Return shape and dtype of every layer's KV cache and scales, with `pages` pages."""
    specs = specs_of(program, "input")
    return {
        name: ((pages, *shape[1:]), dtype)
        for name, (shape, dtype) in specs.items()
        if name.startswith(("kv_caches", "kv_scales"))
    }


@dataclass(frozen=True)
class MemoryDemand:
    """Bytes of an engine without KV pages, and of one KV page in all layers with its scales.

    slots, expert_slot  number of adapter slots in `adapters`, and bytes of the experts in each
    """

    weights: int
    adapters: int
    activations: int
    page: int
    reserve: int = RESERVE_BYTES
    slots: int = 0
    expert_slot: int = 0

    @property
    def fixed(self) -> int:
        """All bytes except the pages."""
        return self.weights + self.adapters + self.activations + self.reserve


NO_DEMAND = MemoryDemand(0, 0, 0, 0, 0)


def plan_pages(
    demand: MemoryDemand, free: int, total: int, utilization: float, max_model_len: int, max_num_seqs: int
) -> int:
    """Return the number of KV pages that fit, at most those of max_num_seqs sequences of max_model_len.

    `free`, `total`: the device's bytes before the engine allocates memory. Raises CapacityError with the missing bytes
    and remedies.
    """
    budget = min(int(total * utilization), free)
    others = total - free
    left = budget - demand.fixed
    needed = pages_for(max_model_len)
    if left < needed * demand.page:
        missing = needed * demand.page - left
        max_tokens = max(0, left // demand.page) * PAGE_SIZE
        remedies = []
        if max_tokens >= PAGE_SIZE:
            remedies.append(f"lower max_model_len to {max_tokens}")
        if utilization < 0.97 and budget == int(total * utilization):
            remedies.append(f"raise gpu_memory_utilization from {utilization:g}")
        if others > total // 20 and budget == free:
            remedies.append(f"free the {_gib(others)} that other processes use on this device")
        remedies.append("lower max_num_batched_tokens or max_num_seqs (activations)")
        if demand.adapters:
            rank = "max_expert_rank" if demand.expert_slot else "max_lora_rank"
            remedies.append(f"lower max_loras or {rank} (adapters)")
        raise CapacityError(
            f"{_gib(missing)} of device memory are missing: weights {_gib(demand.weights)} + adapter stacks "
            f"{_gib(demand.adapters)}{_experts(demand)} + activations {_gib(demand.activations)} + reserve "
            f"{_gib(demand.reserve)} + KV cache for one sequence of max_model_len={max_model_len} "
            f"{_gib(needed * demand.page)} exceed the {_gib(budget)} that may be used of {_gib(total)}; "
            + ", or ".join(remedies)
        )
    return min(left // demand.page, needed * max_num_seqs)


def plan_cpu_pages(page: int, max_model_len: int, max_num_seqs: int) -> int:
    """Return the number of KV pages on a CPU.

    They have CPU_KV_BYTES, but at least the pages of one sequence of max_model_len and at most those of all sequences.
    """
    needed = pages_for(max_model_len)
    return max(needed, min(CPU_KV_BYTES // page, needed * max_num_seqs))


def num_kv_pages(
    program: Program,
    config: LlamaConfig,
    options: EngineOptions,
    sizes: EngineSizes,
    device: torch.device,
    sampled_rows: int,
    draft: MemoryDemand = NO_DEMAND,
) -> int:
    """Return the engine's number of KV pages. Raises CapacityError.

    program       the program that needs the most memory
    sampled_rows  maximum number of sampled rows in a step
    draft         memory demand of a trained draft
    """
    page = nbytes(kv_specs(program, 1)) + draft.page
    if options.num_kv_pages is not None:
        return options.num_kv_pages
    if device.type == "cpu":
        return plan_cpu_pages(page, sizes.max_model_len, sizes.max_num_seqs)
    activations = program.arena_bytes + 4 * SAMPLING_COPIES * sampled_rows * config.vocab_size
    reported = config.vocab_size if options.max_logprobs == -1 else min(options.max_logprobs, config.vocab_size)
    activations += LOGPROB_BYTES * sampled_rows * reported
    if options.speculation != "off":  # int32 tokens of `TokenHistory`
        rows, rings = sizes.max_num_seqs * (sizes.max_model_len + 1), RINGS * options.speculation_history
        activations += 4 * (rows + rings)
    stacks = specs_of(program, "adapter")
    # one slot more for the buffer of `SlotCopier`
    slots = 1 + next((shape[0] for shape, _ in stacks.values()), 1)
    adapters = (nbytes(stacks) + draft.adapters) * slots // (slots - 1)
    weights = nbytes(specs_of(program, "weight")) + draft.weights
    expert_slot = expert_bytes(stacks) // (slots - 1)
    demand = MemoryDemand(weights, adapters, activations + draft.activations, page, RESERVE_BYTES, slots, expert_slot)
    free, total = torch.cuda.mem_get_info(device)
    return plan_pages(demand, free, total, options.gpu_memory_utilization, sizes.max_model_len, sizes.max_num_seqs)


def num_host_pages(kv_host_gb: float, page: int, tp_size: int) -> int:
    """Return the number of KV pages in host memory. `page`: bytes of a KV page of this rank.

    Raises OptionError if there is none, and CapacityError if the host has too little free memory.
    """
    budget = int(kv_host_gb * GIB / tp_size)
    if budget < page:
        raise OptionError(
            f"kv_host_gb={kv_host_gb:g} does not hold one KV page of {page * tp_size} bytes; raise it, or leave it out"
        )
    available = _available_host_bytes()
    if budget > available:
        raise CapacityError(
            f"kv_host_gb={kv_host_gb:g} needs {_gib(budget)} of host memory, and {_gib(available)} are free; lower it"
        )
    return budget // page


def _available_host_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def min_over_ranks(pages: int, options: CompileOptions) -> int:
    """Return the smallest number of pages of all tensor-parallel ranks: they execute the same plans."""
    if options.tensor_parallel == 1:
        return pages
    group = group_named(tensor_parallel_group(options.tensor_parallel))
    return min(int(each) for each in group.gather(torch.tensor([pages])))


def _experts(demand: MemoryDemand) -> str:
    """Return the experts' part of the adapter stacks as text."""
    if not demand.expert_slot:
        return ""
    size = f"{demand.slots - 1} + 1 slots x {demand.expert_slot / (1 << 20):.0f} MiB"
    return f" (of these expert stacks {_gib(demand.slots * demand.expert_slot)}: {size})"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
