"""LoRALinear: a linear layer with a low-rank update for each token's adapter."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .families import ATTENTION_MODULES, MLP_MODULES

TARGETS = ATTENTION_MODULES + MLP_MODULES
PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
RANK_MULTIPLE = 16


@dataclass(frozen=True)
class LoraShape:
    """The model's LoRA stacks.

    `slots` adapters at once, of at most `rank` (a multiple of 16), on the projections in `targets`. Targets of one GEMM
    (q/k/v, gate/up) are completed: one adds the others.
    """

    slots: int
    rank: int
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown:
            raise ValueError(f"LoRA targets {unknown} do not exist in Llama: choose among {', '.join(TARGETS)}")
        if self.slots < 1 or self.rank < 1 or self.rank % RANK_MULTIPLE:
            raise ValueError(
                f"a LoRA stack of {self.slots} slots and rank {self.rank} is impossible: slots >= 1, rank a positive "
                f"multiple of {RANK_MULTIPLE}"
            )
        closed = set(self.targets)
        for group in PACKED:
            if closed & set(group):
                closed |= set(group)
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in closed))


class LoRALinear(nn.Module):
    """y = x W^T (+ b), plus (x A^T) B^T of each token's adapter.

    weight [N, K], bias [N] or None; with adapters lora_a [S, R, K] and lora_b [S, N, R] (with alpha / rank in B).
    `lora`: None for a projection without stacks. `stored`: eight-bit values with a scale [N, 1] (fp32) for each output
    channel.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        lora: LoraShape | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
        bias: bool = False,
        stored: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=stored or dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale: nn.Parameter | None = None
        if stored is not None:
            scales = torch.empty(out_features, 1, dtype=torch.float32, device=device)
            self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        self.has_lora = lora is not None
        if lora is not None:
            self.register_buffer("lora_a", torch.zeros(lora.slots, lora.rank, in_features, dtype=dtype, device=device))
            self.register_buffer("lora_b", torch.zeros(lora.slots, out_features, lora.rank, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor, adapter_index: torch.Tensor) -> torch.Tensor:
        """x [T, K], adapter_index [T] (slot, -1 = none) -> [T, N]."""
        weight: torch.Tensor = self.weight
        if self.weight_scale is not None:
            weight = (weight.to(torch.float32) * self.weight_scale).to(x.dtype)
        y = F.linear(x, weight, self.bias)
        if not self.has_lora:
            return y
        slot = adapter_index.clamp(min=0)
        shrunk = torch.bmm(self.lora_a[slot], x.unsqueeze(-1))
        delta = torch.bmm(self.lora_b[slot], shrunk).squeeze(-1)
        return y + delta * (adapter_index >= 0).unsqueeze(-1).to(delta.dtype)
