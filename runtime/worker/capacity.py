"""Does it fit? What a device's memory is needed for, and how many KV pages the rest holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...compiler.options import CompileOptions
from ...compiler.program.program import Program
from ...graphs.config import LlamaConfig
from ...ops.collectives.group import group_named, tensor_parallel_group
from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from ..api.errors import CapacityError
from ..engine.options import EngineOptions
from ..engine.resolve import EngineSizes
from .answer_history import histories_bytes

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
GIB = 1 << 30
CPU_KV_BYTES = GIB // 2
RESERVE_BYTES = 768 << 20  # kernels, CUDA graphs, split-K workspaces, the allocator's rounding
SAMPLING_COPIES = 4  # fp32 copies of the logits while a step with penalties and logprobs is sampled


def nbytes(specs: Specs) -> int:
    """Bytes of all tensors of `specs`."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def specs_of(program: Program, kind: str) -> Specs:
    """Shape and dtype of a program's buffers of one kind, by name."""
    return {buffer.name: (buffer.shape, buffer.dtype) for buffer in program.of_kind(kind)}


def kv_specs(program: Program, pages: int) -> Specs:
    """Shape and dtype of every layer's KV cache and scales, with `pages` pages."""
    specs = specs_of(program, "input")
    return {
        name: ((pages, *shape[1:]), dtype)
        for name, (shape, dtype) in specs.items()
        if name.startswith(("kv_caches", "kv_scales"))
    }


@dataclass(frozen=True)
class Demand:
    """Bytes that are needed before the first KV page, and bytes of a page (in every layer, scales included)."""

    weights: int
    adapters: int
    activations: int
    page: int
    reserve: int = RESERVE_BYTES

    @property
    def fixed(self) -> int:
        """Everything but the pages."""
        return self.weights + self.adapters + self.activations + self.reserve


NOTHING = Demand(0, 0, 0, 0, 0)


def sampling_bytes(rows: int, vocabulary: int) -> int:
    """Memory for sampling `rows` rows of logits."""
    return SAMPLING_COPIES * rows * vocabulary * 4


def plan_pages(demand: Demand, free: int, total: int, utilization: float, max_model_len: int, max_num_seqs: int) -> int:
    """How many KV pages fit.

    free, total: the device's bytes before anything of this engine is there. At most as many pages as max_num_seqs
    sequences of max_model_len can use. Raises CapacityError, saying how much is missing and what to change.
    """
    budget = min(int(total * utilization), free)
    others = total - free
    left = budget - demand.fixed
    need = pages_for(max_model_len)
    if left < need * demand.page:
        missing = need * demand.page - left
        holds = max(0, left // demand.page) * PAGE_SIZE
        remedies = []
        if holds >= PAGE_SIZE:
            remedies.append(f"lower max_model_len to {holds}")
        if utilization < 0.97 and budget == int(total * utilization):
            remedies.append(f"raise gpu_memory_utilization from {utilization:g}")
        if others > total // 20 and budget == free:
            remedies.append(f"free the {_gib(others)} that others hold on this device")
        remedies.append("lower max_num_batched_tokens or max_num_seqs (activations)")
        if demand.adapters:
            remedies.append("lower max_loras or max_lora_rank (adapters)")
        raise CapacityError(
            f"{_gib(missing)} of device memory are missing: weights {_gib(demand.weights)} + adapter stacks "
            f"{_gib(demand.adapters)} + activations "
            f"{_gib(demand.activations)} + reserve {_gib(demand.reserve)} + KV cache for one sequence of "
            f"max_model_len={max_model_len} "
            f"{_gib(need * demand.page)} exceed the {_gib(budget)} that may be used of {_gib(total)}; "
            + ", or ".join(remedies)
        )
    return min(left // demand.page, need * max_num_seqs)


def plan_cpu_pages(page: int, max_model_len: int, max_num_seqs: int) -> int:
    """A modest pool for runs without a GPU: half a GiB, but at least one longest sequence and at most what all
    sequences can use.
    """
    need = pages_for(max_model_len)
    return max(need, min(CPU_KV_BYTES // page, need * max_num_seqs))


def num_kv_pages(
    program: Program,
    config: LlamaConfig,
    options: EngineOptions,
    sizes: EngineSizes,
    device: torch.device,
    sampled_rows: int,
    more: Demand = NOTHING,
) -> int:
    """How many KV pages there will be; `program` is the one that needs the most memory, `sampled_rows` the most that a
    step samples, `more` what a trained draft needs. Raises CapacityError.
    """
    page = nbytes(kv_specs(program, 1)) + more.page
    if options.num_kv_pages is not None:
        return options.num_kv_pages
    if device.type == "cpu":
        return plan_cpu_pages(page, sizes.max_model_len, sizes.max_num_seqs)
    activations = program.arena_bytes + sampling_bytes(sampled_rows, config.vocab_size)
    if options.speculation != "off":
        activations += histories_bytes(sizes.max_num_seqs, sizes.max_model_len, options.speculation_history)
    stacks = specs_of(program, "adapter")
    slots = next((shape[0] for shape, _ in stacks.values()), 1)
    # one slot more: `slot_copy`'s buffer
    adapters = (nbytes(stacks) + more.adapters) * (slots + 1) // slots
    weights = nbytes(specs_of(program, "weight")) + more.weights
    demand = Demand(weights, adapters, activations + more.activations, page)
    free, total = torch.cuda.mem_get_info(device)
    return plan_pages(demand, free, total, options.gpu_memory_utilization, sizes.max_model_len, sizes.max_num_seqs)


def least_of_ranks(pages: int, options: CompileOptions) -> int:
    """The fewest pages that one of the ranks that share a model has room for: plans are the same for all."""
    if options.tensor_parallel == 1:
        return pages
    group = group_named(tensor_parallel_group(options.tensor_parallel))
    return min(int(each) for each in group.gather(torch.tensor([pages])))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
