"""Llama as a plain module, with the additions of other families (see `LlamaConfig`).

The compiler captures the module; eager runs with the reference ops check the compiled result. The tokens of all
sequences share one dimension T; keys and values are in a paged cache.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from ..ops import all_ops as _all_ops  # noqa: F401  (registers torch.ops.sidestream.*)
from ..ops.core.kv_layout import kv_cache_shape
from .config import LlamaConfig
from .lora import STORED_DTYPES, LoRALinear, LoraShape
from .moe.sparse_mlp import SparseMLP
from .rotary import apply_rotary, inverse_frequencies

INV_FREQ = "model.rotary_emb.inv_freq"


class StepDims(NamedTuple):
    """Symbolic dimensions of a step's arguments."""

    tokens: Any
    sequences: Any
    pages: Any
    blocks: Any

    @staticmethod
    def create() -> "StepDims":
        """Return the dimensions. Torch imports its tracer for them: seconds that a warm start does not need."""
        return StepDims(*map(Dim, StepDims._fields))

    def shapes(self) -> dict[str, Any]:
        """Return the dimensions of the arguments that every step has."""
        return {
            "input_ids": {0: self.tokens},
            "positions": {0: self.tokens},
            "slot_mapping": {0: self.tokens},
            "adapter_index": {0: self.tokens},
            "block_table": {0: self.sequences, 1: self.blocks},
            "context_lens": {0: self.sequences},
            "query_start": {0: self.sequences + 1},
        }


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x * factor, or x itself for the factor 1 of most families."""
    return x if factor == 1.0 else x * factor


class StepInputs(NamedTuple):
    """The tensors of a step that every layer reads: cos, sin [T, 1, D]; `Llama.forward` has the other shapes."""

    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    adapter_index: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor


class RMSNorm(nn.Module):
    """RMS norm over the last dimension: y = weight * x / rms(x), with the mean in fp32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., size], any float dtype, in x's shape and dtype."""
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.eps)
        return self.weight * wide.to(x.dtype)


class Embedding(nn.Module):
    """Embedding table: token ids [T] select rows of weight [V, H].

    With adapters, lora_a [S, V, R] and lora_b [S, H, R] change the rows: an adapter's row is w + lora_b a.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(
        self,
        rows: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | None,
        lora: LoraShape | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype, device=device), requires_grad=False)
        self.has_lora = lora is not None and "embed_tokens" in lora.targets
        if lora is not None and self.has_lora:
            self.register_buffer("lora_a", torch.zeros(lora.slots, rows, lora.rank, dtype=dtype, device=device))
            self.register_buffer("lora_b", torch.zeros(lora.slots, size, lora.rank, dtype=dtype, device=device))

    def forward(self, input_ids: torch.Tensor, adapter_index: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows [T, H] of input_ids [T], for adapter_index [T] (the slot, -1 = no adapter)."""
        if not self.has_lora:
            return F.embedding(input_ids, self.weight)
        return torch.ops.sidestream.embedding(input_ids, self.weight, None, self.lora_a, self.lora_b, adapter_index)


class RotaryEmbedding(nn.Module):
    """Angles of RoPE: positions [T] give cos and sin, fp32 [T, 1, D], with two equal halves."""

    inv_freq: torch.Tensor

    def __init__(self, config: LlamaConfig, device: torch.device | None) -> None:
        super().__init__()
        frequencies = inverse_frequencies(config)
        target = device if device is not None else torch.get_default_device()
        self.register_buffer("inv_freq", frequencies.to(target), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) of the positions."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(
        self, config: LlamaConfig, layer: int, lora: LoraShape | None, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.query_shape = (-1, config.num_attention_heads, config.head_dim)
        self.key_shape = (-1, config.num_key_value_heads, config.head_dim)
        self.softmax_scale = config.softmax_scale_of(layer)
        self.rotates = layer not in config.unrotated_layers
        self.window = config.window_of(layer)
        home = f"model.layers.{layer}.self_attn"
        self.q_proj = _projection(f"{home}.q_proj", config, lora, dtype, device)
        self.k_proj = _projection(f"{home}.k_proj", config, lora, dtype, device)
        self.v_proj = _projection(f"{home}.v_proj", config, lora, dtype, device)
        self.o_proj = _projection(f"{home}.o_proj", config, lora, dtype, device)
        self.q_norm = self.k_norm = None
        if config.head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)

    def forward(self, hidden_states: torch.Tensor, step: StepInputs, kv_cache: torch.Tensor) -> torch.Tensor:
        """Return attention's output [T, H] for hidden_states [T, H]; append keys and values to kv_cache."""
        q = self.q_proj(hidden_states, step.adapter_index).view(self.query_shape)
        k = self.k_proj(hidden_states, step.adapter_index).view(self.key_shape)
        v = self.v_proj(hidden_states, step.adapter_index).view(self.key_shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = apply_rotary(q, step.cos, step.sin), apply_rotary(k, step.cos, step.sin)
        torch.ops.sidestream.append_kv(k, v, kv_cache, None, step.slot_mapping)
        output = torch.ops.sidestream.paged_attention(
            *(q, kv_cache, None, step.block_table, step.context_lens, step.query_start),
            *(self.softmax_scale, False, False),
            window=self.window,
        )
        return self.o_proj(output, step.adapter_index)


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: LlamaConfig, layer: int, lora: LoraShape | None, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        home = f"model.layers.{layer}.mlp"
        self.gate_proj = _projection(f"{home}.gate_proj", config, lora, dtype, device)
        self.up_proj = _projection(f"{home}.up_proj", config, lora, dtype, device)
        self.down_proj = _projection(f"{home}.down_proj", config, lora, dtype, device)

    def forward(self, x: torch.Tensor, adapter_index: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [T, H] for x [T, H] and adapter_index [T]."""
        return self.down_proj(F.silu(self.gate_proj(x, adapter_index)) * self.up_proj(x, adapter_index), adapter_index)


class DecoderLayer(nn.Module):
    """Attention and MLP: each reads a norm of the residual and is added to the residual."""

    def __init__(
        self, config: LlamaConfig, layer: int, lora: LoraShape | None, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.self_attn = Attention(config, layer, lora, dtype, device)
        self.mlp: nn.Module = (SparseMLP if config.is_sparse(layer) else MLP)(config, layer, lora, dtype, device)
        self.sparse = config.is_sparse(layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(self, hidden_states: torch.Tensor, step: StepInputs, kv_cache: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [T, H] for hidden_states [T, H]; append keys and values to kv_cache."""
        attended = self.self_attn(self.input_layernorm(hidden_states), step, kv_cache)
        hidden_states = hidden_states + times(attended, self.residual_multiplier)
        normed = self.post_attention_layernorm(hidden_states)
        inputs = (step.adapter_index, step.slot_mapping) if self.sparse else (step.adapter_index,)
        update = self.mlp(normed, *inputs)
        return hidden_states + times(update, self.residual_multiplier)


class Decoder(nn.Module):
    """Embedding, layers and last norm; named `model` in checkpoints."""

    def __init__(
        self,
        config: LlamaConfig,
        lora: LoraShape | None,
        dtype: torch.dtype,
        device: torch.device | None,
        features: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.features = features
        self.embedding_multiplier = config.embedding_multiplier
        self.logits_scaling = config.logits_scaling
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device, lora)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, lora, dtype, device) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.rotary_emb = RotaryEmbedding(config, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapter_index: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start: torch.Tensor,
        kv_caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return (hidden states [T, H] / `logits_scaling`, list of hidden states after each layer in `features`)."""
        hidden_states = times(self.embed_tokens(input_ids, adapter_index), self.embedding_multiplier)
        cos, sin = self.rotary_emb(positions)
        step = StepInputs(cos, sin, slot_mapping, adapter_index, block_table, context_lens, query_start)
        after = []
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden_states = layer(hidden_states, step, kv_cache)
            after.append(hidden_states)
        return times(self.norm(hidden_states), 1 / self.logits_scaling), [after[count - 1] for count in self.features]


class Llama(nn.Module):
    """A Llama with stacks for `lora.slots` adapters (`lora=None`: none).

    `dtype` of weights, activations and caches; None: the checkpoint's. Parameters are uninitialised: load them, or
    build on the meta device to capture. `features`: layer numbers, counted from 1; `forward` also returns the hidden
    states after these layers.
    """

    def __init__(
        self,
        config: LlamaConfig,
        lora: LoraShape | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        features: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.lora = lora
        self.dtype: torch.dtype = dtype if dtype is not None else getattr(torch, config.dtype)
        place = torch.device(device) if device is not None else None
        self.model = Decoder(config, lora, self.dtype, place, features)
        stacks = replace(lora, parts=()) if lora is not None and "lm_head" in lora.targets else None
        self.lm_head: LoRALinear | None = None  # tied: the embedding is used twice
        if not config.tie_word_embeddings or stacks is not None:
            self.lm_head = LoRALinear(config.hidden_size, config.vocab_size, stacks, self.dtype, place)
        if self.lm_head is not None and config.tie_word_embeddings:
            del self.lm_head.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapter_index: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start: torch.Tensor,
        logits_indices: torch.Tensor,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one step over T tokens of B sequences; return logits [B, V] of the tokens in `logits_indices`.

        With `features`, return a tuple of the logits and the hidden states [T, H] after each of these layers.

        input_ids, positions [T] int64 or int32; slot_mapping [T] int32 (page * 64 + offset, -1 = padding);
        adapter_index [T] int32 (-1 = no adapter); block_table [B, P], context_lens [B] (this step's tokens included),
        query_start [B + 1], logits_indices [B] int32; kv_caches: per layer [pages, kv heads, 2, 64, D], written in
        place.
        """
        hidden_states, features = self.model(
            input_ids, positions, slot_mapping, adapter_index, block_table, context_lens, query_start, kv_caches
        )
        hidden_states = hidden_states.index_select(0, logits_indices)
        head = self.model.embed_tokens.weight
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            head = self.lm_head.weight
        logits = F.linear(hidden_states, head)
        if self.lm_head is not None and self.lm_head.has_lora:
            logits = logits + self.lm_head.delta(hidden_states, adapter_index.index_select(0, logits_indices))
        return (logits, *features) if features else logits

    def checkpoint_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of each tensor of a checkpoint."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def derived_tensors(self) -> dict[str, torch.Tensor]:
        """Return name -> value of the buffers that are computed from the config, on the CPU also for a meta model."""
        return {INV_FREQ: inverse_frequencies(self.config)}

    def layer_modules(self) -> Sequence[nn.Module]:
        """Return the decoder layers."""
        return list(self.model.layers)

    def with_layers(self, layers: Sequence[int]) -> Optional["Llama"]:
        """Return a model of these layers, which shares their tensors; None with `features`."""
        if self.model.features:
            return None
        fewer, decoder = copy.copy(self), copy.copy(self.model)
        decoder._modules = {**self.model._modules, "layers": nn.ModuleList(self.model.layers[each] for each in layers)}
        fewer._modules = {**self._modules, "model": decoder}
        return fewer

    def example_inputs(self, tokens: int = 24, sequences: int = 6, pages: int = 16, blocks: int = 4) -> dict[str, Any]:
        """Return keyword arguments of `forward` for capture; sizes differ, so that no dimensions are merged."""
        device = self.model.norm.weight.device

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        shape = kv_cache_shape(pages, self.config.num_key_value_heads, self.config.head_dim)
        return {
            "input_ids": integers(tokens, dtype=torch.int64),
            "positions": integers(tokens, dtype=torch.int64),
            "slot_mapping": integers(tokens),
            "adapter_index": integers(tokens),
            "block_table": integers(sequences, blocks),
            "context_lens": integers(sequences),
            "query_start": integers(sequences + 1),
            "logits_indices": integers(sequences),
            "kv_caches": [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.model.layers],
        }

    def dynamic_shapes(self) -> dict[str, Any]:
        """Return the symbolic dimensions of `example_inputs`, for `torch.export.export(..., strict=False)`."""
        dims = StepDims.create()
        caches = [{0: dims.pages} for _ in self.model.layers]
        return {**dims.shapes(), "logits_indices": {0: dims.sequences}, "kv_caches": caches}


def _projection(
    module: str, config: LlamaConfig, lora: LoraShape | None, dtype: torch.dtype, device: torch.device | None
) -> LoRALinear:
    """Return the linear of `module`, a full name."""
    name = module.rpartition(".")[2]
    outputs, inputs = config.module_shape(name)
    stacks = lora if lora is not None and name in lora.targets else None
    stored = None if module in config.plain_projections else STORED_DTYPES.get(config.weight_format)
    return LoRALinear(inputs, outputs, stacks, dtype, device, bias=name in config.biases, stored=stored)
