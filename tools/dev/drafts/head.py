"""A trainable head: EAGLE-3's layer over whole sequences with an unrolled chain, and adapters' LoRA on it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from ....graphs.config import LlamaConfig
from ....graphs.draft.config import LORA_DIRECTORY
from ....graphs.families import ATTENTION_MODULES, MLP_MODULES
from ....graphs.rotary import inverse_frequencies

PROJECTIONS = (*(f"self_attn.{name}" for name in ATTENTION_MODULES), *(f"mlp.{name}" for name in MLP_MODULES))
READ_BOTH = PROJECTIONS[:3]
"""Projections that read an embedding and a hidden state."""
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
POSITIONS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
"""Fields of config.json about positions."""
DISCOUNT = 0.8
"""Factor of the loss from one step of the chain to the next, since a draft needs those before it."""


@dataclass(frozen=True)
class Batch:
    """N sequences of T + 1 tokens, padded on the right.

    tokens    [N, T + 1] int64
    features  [N, T, 3H]: the target's hidden states at the first T of them
    wanted    [N, T, V']: the target's log-probabilities at the second to the last, over the head's vocabulary; row j is
              for position j + 2
    weights   [N, T] fp32: weight of each row; 0 for padding
    first     the position of the first token
    """

    tokens: torch.Tensor
    features: torch.Tensor
    wanted: torch.Tensor
    weights: torch.Tensor
    first: int = 0


class Head(nn.Module):
    """Parameters of a head for `target` that drafts the tokens `vocabulary` [V'], ascending. In fp32."""

    embedding: torch.Tensor
    vocabulary: torch.Tensor
    frequencies: torch.Tensor

    def __init__(
        self, target: LlamaConfig, layers: tuple[int, int, int], vocabulary: torch.Tensor, embedding: torch.Tensor
    ) -> None:
        super().__init__()
        self.target, self.layers = target, layers
        width = target.hidden_size
        shapes = {name: target.module_shape(name) for name in PROJECTIONS}
        shapes |= {name: (outputs, 2 * width) for name, (outputs, _) in shapes.items() if name in READ_BOTH}
        self.values = nn.ParameterDict(
            {
                _key("fc.weight"): torch.zeros(width, 3 * width),
                **{_key(f"midlayer.{name}.weight"): torch.ones(width) for name in NORMS},
                **{_key(f"midlayer.{name}.weight"): torch.zeros(shape) for name, shape in shapes.items()},
                _key("norm.weight"): torch.ones(width),
                _key("lm_head.weight"): torch.zeros(len(vocabulary), width),
            }
        )
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("frequencies", inverse_frequencies(target), persistent=False)
        self.lora: dict[str, nn.ParameterList] = {}
        self.scaling = 1.0

    def begin_as(self, state: Mapping[str, torch.Tensor], seed: int) -> None:
        """Initialize from the target's last layer, norm and output projection."""
        last = f"model.layers.{self.target.num_hidden_layers - 1}."
        width, dice = self.target.hidden_size, torch.Generator().manual_seed(seed)
        with torch.no_grad():
            fused = self.values[_key("fc.weight")]
            fused.copy_(torch.randn(fused.shape, generator=dice) * 0.02)
            fused[:, 2 * width :] += torch.eye(width, device=fused.device)
            for name in PROJECTIONS:
                weight = state[f"{last}{name}.weight"].float()
                mine = self.values[_key(f"midlayer.{name}.weight")]
                if name in READ_BOTH:
                    noise = torch.randn(weight.shape, generator=dice) * 0.02
                    weight = torch.cat((noise.to(weight.device), weight), dim=1)
                mine.copy_(weight)
            for name, source in zip(NORMS, ("input_layernorm", None, "post_attention_layernorm"), strict=True):
                if source is not None:
                    self.values[_key(f"midlayer.{name}.weight")].copy_(state[f"{last}{source}.weight"])
            # embeddings are small: normed they have the size of a hidden state with a norm's gain
            gain = state[f"{last}input_layernorm.weight"].float().abs().mean()
            self.values[_key("midlayer.input_layernorm.weight")].fill_(float(gain))
            self.values[_key("norm.weight")].copy_(state["model.norm.weight"])
            head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
            self.values[_key("lm_head.weight")].copy_(head[self.vocabulary.to(head.device)])

    def add_lora(self, rank: int, alpha: float, seed: int) -> list[nn.Parameter]:
        """Put a new LoRA on every projection of the layer, and return its parameters; the head's own are frozen."""
        dice = torch.Generator().manual_seed(seed)
        self.requires_grad_(False)
        self.lora, self.scaling = {}, alpha / rank
        for name in PROJECTIONS:
            weight = self.values[_key(f"midlayer.{name}.weight")]
            outputs, inputs = weight.shape
            a = torch.randn(rank, inputs, generator=dice) / math.sqrt(inputs)
            pair = nn.ParameterList([a.to(weight.device), torch.zeros(outputs, rank, device=weight.device)])
            self.lora[name] = pair
        return [parameter for pair in self.lora.values() for parameter in pair]

    def unrolled(self, batch: Batch, depth: int) -> Iterator[torch.Tensor]:
        """Return logits [N, T, V'] of each step of a chain.

        Row j of step m continues from m rows of the head's own, in a chain that started after row j - m; rows j < m are
        unused.
        """
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        embedded = self._norm(F.embedding(batch.tokens[:, 1:], self.embedding), "midlayer.input_layernorm")
        hidden = F.linear(batch.features.float(), self.values[_key("fc.weight")])
        for step in range(depth):
            if step:
                hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
            hidden = self._layer(embedded, hidden, keys, values, batch.first)
            yield F.linear(self._norm(hidden, "norm"), self.values[_key("lm_head.weight")])

    def _layer(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        first: int,
    ) -> torch.Tensor:
        """Run the layer over a step's rows [N, T, H]; its keys and values are appended to `keys` and `values`."""
        count, length, _ = hidden.shape
        dim, groups = self.target.head_dim, self.target.num_key_value_heads
        both = torch.cat((embedded, self._norm(hidden, "midlayer.hidden_norm")), dim=-1)
        q, k, v = (
            self._linear(both, f"self_attn.{name}_proj").view(count, length, -1, dim).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        angles = (torch.arange(length, device=hidden.device) + first)[:, None] * self.frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1) * sin for x in (q, k))
        repeats = q.shape[1] // groups
        keys.append(k.repeat_interleave(repeats, dim=1))
        values.append(v.repeat_interleave(repeats, dim=1))
        back = len(keys) - 1
        # the rows before the chain, from the target's hidden states
        place = torch.arange(length, device=hidden.device)
        seen = place[None, :] <= place[:, None] - back
        scores = (q @ keys[0].transpose(-1, -2) / math.sqrt(dim)).masked_fill(~seen, -1e30)
        # then one row of each step of the chain, on a diagonal
        own = [_shifted(keys[step], back - step) for step in range(1, back + 1)]
        diagonal = [(q * key).sum(-1, keepdim=True) / math.sqrt(dim) for key in own]
        weights = torch.cat((scores, *diagonal), dim=-1).softmax(-1)
        mixed = weights[..., :length] @ values[0]
        for step in range(1, back + 1):
            mixed = mixed + weights[..., length + step - 1, None] * _shifted(values[step], back - step)
        hidden = hidden + self._linear(mixed.transpose(1, 2).reshape(count, length, -1), "self_attn.o_proj")
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        inner = F.silu(self._linear(x, "mlp.gate_proj")) * self._linear(x, "mlp.up_proj")
        return hidden + self._linear(inner, "mlp.down_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        result = F.linear(x, self.values[_key(f"midlayer.{name}.weight")])
        if name in self.lora:
            a, b = self.lora[name]
            result = result + F.linear(F.linear(x, a), b) * self.scaling
        return result

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.target.rms_norm_eps)
        return self.values[_key(f"{name}.weight")] * (x * scale)

    def save(self, directory: Path, written: Mapping[str, Any]) -> None:
        """Write the head in the format of published ones in bfloat16; `written` is the target's config.json."""
        directory.mkdir(parents=True, exist_ok=True)
        target = self.target
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": target.num_key_value_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "vocab_size": target.vocab_size,
            "draft_vocab_size": len(self.vocabulary),
            "rms_norm_eps": target.rms_norm_eps,
            **{name: written[name] for name in POSITIONS if name in written},
            "tie_word_embeddings": False,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": list(target.eos_token_ids),
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tensors = {_name(key): value.detach().to(torch.bfloat16).cpu() for key, value in self.values.items()}
        chosen = self.vocabulary.cpu()
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        tensors["t2d"] = torch.isin(torch.arange(target.vocab_size), chosen)
        save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")

    def save_lora(self, adapter: Path) -> None:
        """Write the LoRA into an adapter's directory, as PEFT does."""
        directory = adapter / LORA_DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        rank = next(iter(self.lora.values()))[0].shape[0]
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": self.scaling * rank,
            "target_modules": [name.rpartition(".")[2] for name in PROJECTIONS],
        }
        (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        tensors = {}
        for name, pair in self.lora.items():
            for side, value in zip("AB", pair, strict=True):
                stored = value.detach().to(torch.bfloat16).cpu().contiguous()
                tensors[f"base_model.model.midlayer.{name}.lora_{side}.weight"] = stored
        save_file(tensors, directory / "adapter_model.safetensors")


def losses(head: Head, batch: Batch, depth: int) -> tuple[torch.Tensor, list[float], list[float]]:
    """Return (loss, right drafts of each step of the chain, rows); prompt rows count for the loss only."""
    total = batch.features.new_zeros((), dtype=torch.float32)
    held, tried = [], []
    best = batch.wanted.argmax(-1)
    for step, logits in enumerate(head.unrolled(batch, depth)):
        weights = batch.weights.clone()
        weights[:, :step] = 0.0
        each = -(batch.wanted.exp() * logits.log_softmax(-1)).sum(-1)
        total = total + DISCOUNT**step * (each * weights).sum() / weights.sum().clamp_min(1.0)
        with torch.no_grad():
            counted = weights >= 1.0
            held.append(((logits.argmax(-1) == best) & counted).sum())
            tried.append(counted.sum())
    return total, [float(each) for each in held], [float(each) for each in tried]


def feature_layers(layers: int) -> tuple[int, int, int]:
    """Return the layers of a target that the head reads, without the last one."""
    return (2, layers // 2, layers - 3) if layers >= 7 else (1, max(1, layers // 2), max(1, layers - 1))


def check_family(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a target with arithmetic that the head does not support."""
    if config.get("model_type") != "llama":
        raise ValueError(
            f"a draft is trained for Llamas, and the model is a {config.get('model_type')!r}; use a head that was "
            "trained elsewhere"
        )


def _shifted(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x [N, heads, T, D] shifted by a few rows."""
    return x if rows == 0 else F.pad(x, (0, 0, rows, 0))[:, :, :-rows]


def _key(name: str) -> str:
    """Return a key without dots, for nn.ParameterDict."""
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")
