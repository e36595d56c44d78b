"""Tiny mixtures of experts, and adapters on their experts in every layout: `target_parameters` as PEFT writes it, one
LoRA for each expert as trainers on transformers 4 write it, and the layout of PEFT before 0.19.1.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter_config import CONFIG
from sidestream.graphs.model_directory import WEIGHTS

from .tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_model

PREFIX = "base_model.model."
SIZES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 80},
    "GraniteMoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.0625,
    },
}
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
Tensors = dict[str, torch.Tensor]


def tiny_moe(directory: Path, family: str, **overrides: Any) -> TinyBase:
    """A random model of a family of SIZES; some Qwen3 layers are dense."""
    return tiny_model(directory, family, seed=len(family), **{**SIZES[family], **overrides})


def on_parameters(base: TinyBase, *parameters: str, rank: int = 4, targets: Any = (), **spec: Any) -> Path:
    """An adapter with PEFT's `target_parameters`."""
    extra = {"target_parameters": list(parameters), **spec.pop("extra", {})}
    return tiny_adapters(base, [AdapterSpec(rank=rank, targets=targets, extra=extra, **spec)])[0]


def sparse_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Name -> the module with a router and experts."""
    return {
        name.removesuffix(".experts"): model.get_submodule(name.removesuffix(".experts"))
        for name, _ in model.named_modules()
        if name.endswith(".experts")
    }


def one_by_one(
    base: TinyBase,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    home: str | None = None,
    rank: Callable[[str], int] = lambda module: 4,
    left_out: Callable[[str], bool] = lambda module: False,
    **fields: Any,
) -> Path:
    """An adapter with a LoRA for each expert; `names`: of an expert's gate, up and down. `fields`: of its config.

    `rank` and `left_out` are functions of the module's name. `home`: the sparse block's name, as in transformers 4.
    """
    generator = torch.Generator().manual_seed(7)
    tensors: Tensors = {}
    for block, module in sparse_blocks(base.model).items():
        gate_up, down = module.experts.gate_up_proj, module.experts.down_proj
        width = down.shape[2]
        block = block if home is None else f"{block.rpartition('.')[0]}.{home}"
        for expert in range(len(down)):
            for name, shape in zip(names, ((width, gate_up.shape[2]),) * 2 + (tuple(down.shape[1:]),), strict=True):
                one = f"{block}.experts.{expert}.{name}"
                if left_out(one):
                    continue
                sizes = {"A": (rank(one), shape[1]), "B": (shape[0], rank(one))}
                for side, size in sizes.items():
                    tensors[f"{PREFIX}{one}.lora_{side}.weight"] = (
                        torch.randn(size, generator=generator) * 0.5 / size[1] ** 0.5
                    )
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": list(names)}
    return write(base, tensors, {**config, **fields})


def write(base: TinyBase, tensors: Tensors, fields: Mapping[str, Any]) -> Path:
    """Writes the files of an adapter."""
    path = base.path.parent / f"adapter{len(list(base.path.parent.glob('adapter*')))}"
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(fields))
    return path


def read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """An adapter's tensors and config."""
    return load_file(path / WEIGHTS), json.loads((path / CONFIG).read_text())


def of_old_peft(base: TinyBase, path: Path, version: str | None = "0.18.1") -> Path:
    """The same adapter in the layout of PEFT before 0.19.1, which took a stack [E, N, K] as [E, in, out]."""
    tensors, fields = read(path)
    experts = len(next(iter(sparse_blocks(base.model).values())).experts.down_proj)
    old = dict(tensors)
    for name, a in tensors.items():
        if not any(part in name for part in (".experts.", "_linear.")) or "lora_A" not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        rank = len(a) // experts
        one_a = a.view(experts, rank, -1)  # [E, r, K]
        one_b = torch.stack([b[:, expert::experts] for expert in range(experts)])  # [E, N, r]
        old[name] = one_b.transpose(1, 2).reshape(experts * rank, -1)
        columns = one_a.permute(2, 1, 0)  # [K, r, E]
        old[name.replace("lora_A", "lora_B")] = columns.reshape(len(columns), -1)
    fields = {key: value for key, value in fields.items() if key != "peft_version"}
    return write(base, old, fields if version is None else {**fields, "peft_version": version})


@torch.no_grad()
def merged_one_by_one(base: TinyBase, path: Path, scaling: Callable[[str, int], float]) -> TinyBase:
    """The base with an adapter of `one_by_one` added to its experts, without PEFT. `scaling`: of a module and rank."""
    tensors, _ = read(path)
    model = copy.deepcopy(base.model)
    for block, module in sparse_blocks(model).items():
        layer = block.rpartition(".")[0]
        for name, a in tensors.items():
            if not name.startswith(f"{PREFIX}{layer}.") or "lora_A" not in name or ".experts." not in name:
                continue
            one = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            expert, linear = one.split(".")[-2:]
            delta = scaling(one, len(a)) * tensors[name.replace("lora_A", "lora_B")] @ a
            down = module.experts.down_proj[int(expert)]
            gate, up = module.experts.gate_up_proj[int(expert)].chunk(2)
            rows = {"gate_proj": gate, "w1": gate, "up_proj": up, "w3": up, "down_proj": down, "w2": down}[linear]
            rows += delta
    merged = TinyBase(base.path)
    merged.__dict__["model"] = model
    return merged
