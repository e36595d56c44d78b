"""LoRALinear: a linear layer with a low-rank update for each token's adapter."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .families import ADAPTER_PARTS, ATTENTION_MODULES, EXPERT_TARGETS, MLP_MODULES, VOCABULARY_TARGETS

TARGETS = ATTENTION_MODULES + MLP_MODULES
PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
RANK_MULTIPLE = 16
PROJECTION_STACKS = {"dora": "lora_gain", "ia3": "lora_gain", "bias": "lora_shift"}
"""Parts that act on the results of projections -> their stacks, fp32 [S, N]."""
STORED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""`LlamaConfig.weight_format` -> dtype of stored projections."""


@dataclass(frozen=True)
class LoraShape:
    """The model's LoRA stacks.

    slots    number of adapters at the same time
    rank     largest rank of an adapter, a multiple of 16
    targets  projections with LoRA; one of q/k/v adds the other two, one of gate/up the other, since they share a GEMM.
             Also `embed_tokens` and `lm_head`, and EXPERT_TARGETS in a model with experts
    parts    what else the adapters of a step may have, see ADAPTER_PARTS; programs without parts do not compute them
    expert_rank  largest rank on experts, a multiple of 16; 0: that of `rank`. It is apart since there are many experts
    """

    slots: int
    rank: int
    targets: tuple[str, ...] = TARGETS
    parts: tuple[str, ...] = ()
    expert_rank: int = 0

    def __post_init__(self) -> None:
        known = (*TARGETS, *VOCABULARY_TARGETS, *EXPERT_TARGETS)
        unknown = sorted(set(self.targets) - set(known))
        if unknown:
            raise ValueError(f"LoRA targets {unknown} do not exist in Llama: choose among {', '.join(known)}")
        if self.slots < 1 or self.rank < 1 or self.rank % RANK_MULTIPLE or self.expert_rank % RANK_MULTIPLE:
            raise ValueError(
                f"LoRA stacks of {self.slots} slots and rank {self.rank} are not possible: slots must be at least 1, "
                f"and every rank a positive multiple of {RANK_MULTIPLE}"
            )
        if not self.expert_rank and set(self.targets) & set(EXPERT_TARGETS):
            object.__setattr__(self, "expert_rank", self.rank)
        closed = set(self.targets)
        for group in PACKED:
            if closed & set(group):
                closed |= set(group)
        object.__setattr__(self, "targets", tuple(name for name in known if name in closed))
        object.__setattr__(self, "parts", tuple(part for part in ADAPTER_PARTS if part in self.parts))

    @property
    def key(self) -> dict[str, Any]:
        """The fields as plain values, for keys of caches: without `parts` and `expert_rank` where they say nothing."""
        return {name: value for name, value in asdict(self).items() if name not in ("parts", "expert_rank") or value}

    @property
    def varies(self) -> bool:
        """Whether programs are compiled with and without `parts` and LoRA on the embedding and the output head."""
        return bool(self.parts or set(self.targets) & set(VOCABULARY_TARGETS))

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks of each target: lora_a, lora_b, and those of the parts."""
        of_parts = dict.fromkeys(PROJECTION_STACKS[part] for part in self.parts if part in PROJECTION_STACKS)
        return ("lora_a", "lora_b", *of_parts)


class LoRALinear(nn.Module):
    """Linear layer with LoRA: y = x W^T (+ b) + (x A^T) B^T, with A and B of each token's adapter.

    With parts of adapters: y = (1 + gain) * x W^T + shift (+ b) + (x A^T) B^T.

    weight [N, K], bias [N] or None; with adapters lora_a [S, R, K] and lora_b [S, N, R], which includes alpha / rank
    and DoRA's factor; lora_gain (the factor less one) and lora_shift [S, N] fp32 if the shape has these parts.:
    None for a projection without stacks. `stored`: dtype of eight-bit weights, which have a scale [N, 1] fp32 for each
    output channel.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    lora_gain: torch.Tensor | None
    lora_shift: torch.Tensor | None

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
        for name in PROJECTION_STACKS.values():
            self.register_buffer(name, None)
        if lora is not None:
            self.register_buffer("lora_a", torch.zeros(lora.slots, lora.rank, in_features, dtype=dtype, device=device))
            self.register_buffer("lora_b", torch.zeros(lora.slots, out_features, lora.rank, dtype=dtype, device=device))
            for name in lora.stacks[2:]:
                self.register_buffer(name, torch.zeros(lora.slots, out_features, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor, adapter_index: torch.Tensor) -> torch.Tensor:
        """Return y [T, N] for x [T, K] and adapter_index [T] (the slot, -1 = no adapter)."""
        weight: torch.Tensor = self.weight
        if self.weight_scale is not None:
            weight = (weight.to(torch.float32) * self.weight_scale).to(x.dtype)
        if self.lora_gain is None and self.lora_shift is None:
            y = F.linear(x, weight, self.bias)
        else:
            y = F.linear(x, weight)
            y = torch.ops.sidestream.lora_adjust(y, self.lora_gain, self.lora_shift, adapter_index)
            y = y if self.bias is None else y + self.bias
        return y + self.delta(x, adapter_index) if self.has_lora else y

    def delta(self, x: torch.Tensor, adapter_index: torch.Tensor) -> torch.Tensor:
        """Return the adapters' part of y."""
        slot = adapter_index.clamp(min=0)
        shrunk = torch.bmm(self.lora_a[slot], x.unsqueeze(-1))
        delta = torch.bmm(self.lora_b[slot], shrunk).squeeze(-1)
        return delta * (adapter_index >= 0).unsqueeze(-1).to(delta.dtype)
