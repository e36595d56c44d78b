"""SparseMLP: a mixture of experts in place of a layer's MLP.

The module calls semantic ops, since a loop over experts cannot be captured.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ..config import LlamaConfig
from ..lora import STORED_DTYPES, LoRALinear, LoraShape


class Router(LoRALinear):
    """The router's weight [E, H], with LoRA if `router` is a target. It is never quantized."""

    def route(
        self, x: torch.Tensor, adapter_index: torch.Tensor, slot_mapping: torch.Tensor, top_k: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts [T, top_k] int32, weights [T, top_k] fp32) of x [T, H]; see `moe_route`."""
        delta = self.delta(x, adapter_index) if self.has_lora else None
        return torch.ops.sidestream.moe_route(x, self.weight, delta, slot_mapping, top_k, normalize)


class ExpertLinear(nn.Module):
    """One linear of all experts of a layer: weight [E, N, K].

    With adapters lora_a [S, E, n * R, K] and lora_b [S, E, N, R], where n = len(slices) linears of widths `slices`
    share the input. `stored`: dtype of eight-bit weights, which have a scale [E, N, 1] fp32 for each output channel.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(
        self,
        experts: int,
        in_features: int,
        slices: tuple[int, ...],
        lora: LoraShape | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.slices = list(slices)
        outputs = sum(slices)
        weight = torch.empty(experts, outputs, in_features, dtype=stored or dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale: nn.Parameter | None = None
        if stored is not None:
            scales = torch.empty(experts, outputs, 1, dtype=torch.float32, device=device)
            self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self.has_lora = lora is not None
        if lora is not None:
            a_shape = (lora.slots, experts, len(slices) * lora.expert_rank, in_features)
            b_shape = (lora.slots, experts, outputs, lora.expert_rank)
            self.register_buffer("lora_a", torch.zeros(a_shape, dtype=dtype, device=device))
            self.register_buffer("lora_b", torch.zeros(b_shape, dtype=dtype, device=device))

    def forward(
        self, x: torch.Tensor, adapter_index: torch.Tensor, experts: torch.Tensor, pairs_per_row: int
    ) -> torch.Tensor:
        """Return y [T * k, N] for x [T * k / pairs_per_row, K], adapter_index [T] and experts [T, k]."""
        weight: torch.Tensor = self.weight
        if self.weight_scale is not None:
            weight = (weight.to(torch.float32) * self.weight_scale).to(x.dtype)
        y = torch.ops.sidestream.expert_linear(x, weight, experts, pairs_per_row)
        if not self.has_lora:
            return y
        stacks = self.lora_a, self.lora_b, adapter_index, experts, self.slices, pairs_per_row
        return y + torch.ops.sidestream.expert_lora(x, *stacks)


class SparseMLP(nn.Module):
    """The weighted sum of the chosen experts' gated MLPs: sum over j of w_j * down_j(silu(gate_j x) * up_j x)."""

    def __init__(
        self, config: LlamaConfig, layer: int, lora: LoraShape | None, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.top_k, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.width = width = config.expert_intermediate_size
        targets = () if lora is None else lora.targets
        experts, hidden = config.num_experts, config.hidden_size

        def stacks(target: str) -> LoraShape | None:
            return replace(lora, parts=()) if lora is not None and target in targets else None

        def linear(name: str, target: str, inputs: int, slices: tuple[int, ...]) -> ExpertLinear:
            plain = f"model.layers.{layer}.mlp.experts.{name}" in config.plain_projections
            stored = None if plain else STORED_DTYPES.get(config.weight_format)
            return ExpertLinear(experts, inputs, slices, stacks(target), dtype, device, stored)

        self.gate = Router(hidden, experts, stacks("router"), dtype, device)
        self.experts = nn.ModuleDict(
            {
                "gate_up_proj": linear("gate_up_proj", "experts_gate_up", hidden, (width, width)),
                "down_proj": linear("down_proj", "experts_down", width, (hidden,)),
            }
        )

    def forward(self, x: torch.Tensor, adapter_index: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Return the output [T, H] for x [T, H], adapter_index [T] and slot_mapping [T] (-1: padding)."""
        experts, weights = self.gate.route(x, adapter_index, slot_mapping, self.top_k, self.normalize)
        y = self.experts["gate_up_proj"](x, adapter_index, experts, self.top_k)
        hidden = F.silu(y[:, : self.width]) * y[:, self.width :]
        z = self.experts["down_proj"](hidden, adapter_index, experts, 1)
        return torch.ops.sidestream.moe_combine(z, weights)
