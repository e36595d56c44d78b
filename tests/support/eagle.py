"""Random EAGLE-3 heads on disk, and what they compute by the published formula, over whole sequences and without pages.

path = eagle_head(tmp_path, LlamaConfig.from_directory(base.path))
hidden, logits = dense_head(tensors, config, embedded, features, positions, keys)
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sidestream.graphs.config import LlamaConfig

Keys = list[tuple[int, torch.Tensor, torch.Tensor]]


def eagle_head(
    directory: Path, target: LlamaConfig, *, vocabulary: int | None = None, seed: int = 0, **fields: Any
) -> Path:
    """Writes a head for `target` under `directory`/head that drafts `vocabulary` of its tokens (None: all), chosen at
    random. `fields` change its config.json.
    """
    path = directory / "head"
    path.mkdir(parents=True)
    drafted = vocabulary or target.vocab_size
    layers = target.num_hidden_layers
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": drafted,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, max(1, layers // 2), layers],
        **fields,
    }
    (path / "config.json").write_text(json.dumps(config))
    dice = torch.Generator().manual_seed(seed)
    width, inner, dim = target.hidden_size, config["intermediate_size"], target.head_dim
    queries, keys = config["num_attention_heads"] * dim, target.num_key_value_heads * dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=dice) * 1.5 / math.sqrt(columns)

    def norm() -> torch.Tensor:
        return 0.5 + torch.rand(width, generator=dice)

    chosen = torch.randperm(target.vocab_size, generator=dice)[:drafted].sort().values
    tensors = {
        "fc.weight": matrix(width, 3 * width),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, queries),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": matrix(inner, width),
        "midlayer.mlp.up_proj.weight": matrix(inner, width),
        "midlayer.mlp.down_proj.weight": matrix(width, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(drafted, width),
        "d2t": chosen - torch.arange(drafted),
        "t2d": torch.isin(torch.arange(target.vocab_size), chosen),
    }
    save_file(tensors, path / "model.safetensors")
    return path


def dense_head(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    keys: Keys,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one sequence by the formula of the EAGLE-3 paper: (hidden states [T, H], logits [T, V']).

    `hidden` [T, 3H] or [T, H]. `keys`: (position, key, value) of all rows before; this call adds its own.
    """

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return tensors[name] * x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[name].T

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        half = config["head_dim"] // 2
        angle = position / config["rope_theta"] ** (torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
        )

    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    if hidden.shape[-1] == 3 * embedded.shape[-1]:
        hidden = linear(hidden, "fc.weight")
    normed = norm(hidden, "midlayer.hidden_norm.weight")
    residual = normed if config.get("norm_before_residual") else hidden
    both = torch.cat((norm(embedded, "midlayer.input_layernorm.weight"), normed), dim=-1)
    queries, k, v = (linear(both, f"midlayer.self_attn.{name}_proj.weight") for name in "qkv")
    for position, key, value in zip(positions.tolist(), k.view(-1, groups, dim), v.view(-1, groups, dim), strict=True):
        keys.append((position, turned(key, position), value))
    rows = []
    for position, query in zip(positions.tolist(), queries.view(-1, heads, dim), strict=True):
        seen = [each for each in keys if each[0] <= position]
        for head, q in enumerate(turned(query, position)):
            mine = head // (heads // groups)
            weights = torch.stack([q @ key[mine] for _, key, _ in seen]).div(math.sqrt(dim)).softmax(0)
            rows.append(sum(weight * value[mine] for weight, (_, _, value) in zip(weights, seen, strict=True)))
    attended = torch.stack(rows).view(len(positions), heads * dim)  # type: ignore[arg-type]
    hidden = residual + linear(attended, "midlayer.self_attn.o_proj.weight")
    x = norm(hidden, "midlayer.post_attention_layernorm.weight")
    inner = F.silu(linear(x, "midlayer.mlp.gate_proj.weight")) * linear(x, "midlayer.mlp.up_proj.weight")
    hidden = hidden + linear(inner, "midlayer.mlp.down_proj.weight")
    return hidden, linear(norm(hidden, "norm.weight"), "lm_head.weight")
