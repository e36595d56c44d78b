"""EagleDraft: an EAGLE-3 head as a plain module over the paged cache.

A row at position j reads the token at j + 1 and the target's hidden states at j, and predicts the token at j + 2. The
next row of a chain reads that token and the previous row's hidden states.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...ops import all_ops as _all_ops  # noqa: F401  (registers torch.ops.sidestream.*)
from ...ops.core.kv_layout import kv_cache_shape
from ..llama import MLP, Attention, Embedding, RMSNorm, RotaryEmbedding, StepInputs
from ..lora import LoRALinear, LoraShape
from ..rotary import inverse_frequencies
from .config import EagleConfig

INV_FREQ = "rotary_emb.inv_freq"
EMBEDDING = "embed_tokens.weight"
"""Name of the embedding, which is the target's and not in the head's file."""
MAPPING = "d2t"


class EagleLayer(nn.Module):
    """A Llama layer with attention over a token's embedding and a hidden state, each normed."""

    def __init__(
        self, config: EagleConfig, lora: LoraShape | None, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, 0, lora, dtype, device)
        self.mlp = MLP(config, 0, lora, dtype, device)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self, embedded: torch.Tensor, hidden_states: torch.Tensor, step: StepInputs, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's output [T, H] for embedded and hidden_states [T, H]; see `EagleDraft.forward`."""
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        hidden_states = residual + self.self_attn(both, step, kv_cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), step.adapter_index)


class EagleDraft(nn.Module):
    """A head with stacks for `lora.slots` adapters (`lora=None`: none). `embed_tokens` is the target's embedding.

    `dtype` of weights, activations and cache; None: the checkpoint's. Parameters are uninitialised: load them, or build
    on the meta device to capture.
    """

    d2t: torch.Tensor

    def __init__(
        self,
        config: EagleConfig,
        lora: LoraShape | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.lora = lora
        self.dtype: torch.dtype = dtype if dtype is not None else getattr(torch, config.dtype)
        place = torch.device(device) if device is not None else None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, self.dtype, place)
        self.fc = LoRALinear(3 * config.hidden_size, config.hidden_size, None, self.dtype, place)
        self.midlayer = EagleLayer(config, lora, self.dtype, place)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.dtype, place)
        self.lm_head = LoRALinear(config.hidden_size, config.draft_vocab_size, None, self.dtype, place)
        self.rotary_emb = RotaryEmbedding(config, place)
        self.register_buffer(MAPPING, torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=place))

    def forward(
        self,
        input_ids: torch.Tensor,
        features_or_hidden: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start: torch.Tensor,
        kv_cache: torch.Tensor,
        adapter_index: torch.Tensor | None = None,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step over T rows of B sequences; return (hidden states [T, H], logits).

        Hidden states are inputs of the chain's next rows. Logits are over the draft's vocabulary: [T, V'], or [B, V']
        of the rows in `logits_indices`.

        input_ids [T]: the token after each row's position. features_or_hidden [T, 3 * H]: the target's hidden states at
        the position, in the order of `config.feature_layers`; or [T, H]: the previous row's output. kv_cache [pages, kv
        heads, 2, 64, D], written in place. adapter_index [T] or None: no adapters. The rest is as in `Llama.forward`.
        """
        hidden_states = features_or_hidden
        if hidden_states.shape[-1] != self.config.hidden_size:
            hidden_states = F.linear(hidden_states, self.fc.weight)
        if adapter_index is None:
            adapter_index = torch.full_like(slot_mapping, -1)
        cos, sin = self.rotary_emb(positions)
        step = StepInputs(cos, sin, slot_mapping, adapter_index, block_table, context_lens, query_start)
        hidden_states = self.midlayer(self.embed_tokens(input_ids), hidden_states, step, kv_cache)
        chosen = hidden_states if logits_indices is None else hidden_states.index_select(0, logits_indices)
        return hidden_states, F.linear(self.norm(chosen), self.lm_head.weight)

    def checkpoint_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of each floating-point tensor of a head's file."""
        return {name: tuple(value.shape) for name, value in self.named_parameters() if name != EMBEDDING}

    def derived_tensors(self) -> dict[str, torch.Tensor]:
        """See `Llama.derived_tensors`."""
        return {INV_FREQ: inverse_frequencies(self.config)}

    def load(self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
        """Copy the result of `read_eagle_tensors` and the target's embedding [V, H], for eager runs."""
        with torch.no_grad():
            for name in self.checkpoint_tensors():
                self.get_parameter(name).copy_(tensors[name])
            self.d2t.copy_(tensors[MAPPING])
            self.embed_tokens.weight.copy_(embedding)

    def example_inputs(
        self, tokens: int = 24, sequences: int = 6, pages: int = 16, blocks: int = 4, chain: bool = False
    ) -> dict[str, Any]:
        """Return keyword arguments of `forward` for capture: rows with the target's states, or a `chain`'s rows."""
        device, config = self.norm.weight.device, self.config
        tokens = sequences if chain else tokens

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = config.hidden_size if chain else 3 * config.hidden_size
        cache = kv_cache_shape(pages, config.num_key_value_heads, config.head_dim)
        return {
            "input_ids": integers(tokens, dtype=torch.int64),
            "features_or_hidden": torch.zeros(tokens, width, dtype=self.dtype, device=device),
            "positions": integers(tokens, dtype=torch.int64),
            "slot_mapping": integers(tokens),
            "block_table": integers(sequences, blocks),
            "context_lens": integers(sequences),
            "query_start": integers(sequences + 1),
            "kv_cache": torch.zeros(cache, dtype=self.dtype, device=device),
            "adapter_index": integers(tokens),
            "logits_indices": integers(sequences),
        }
