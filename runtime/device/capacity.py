"""Does it fit? What a device's memory is needed for, and how many KV pages the rest holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..requests.errors import CapacityError
from ..scheduling.pages import pages_for

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
GIB = 1 << 30
CPU_KV_BYTES = GIB // 2
RESERVE_BYTES = 768 << 20  # kernels, CUDA graphs, split-K workspaces, the allocator's rounding
SAMPLING_COPIES = 4  # fp32 copies of the logits while a step with penalties and logprobs is sampled


def nbytes(specs: Specs) -> int:
    """Bytes of all tensors of `specs`."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())


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
        holds = max(0, left // demand.page) * 64
        remedies = []
        if holds >= 64:
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


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
