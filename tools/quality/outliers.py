"""Outliers as large Llamas have them, put into a checkpoint by exact power-of-two rescaling. What is measured on it is
labelled "injected".

Every injection multiplies rows of one matrix by 2^n and what meets them by 2^-n, in the base model and in its adapters
alike, so all products are what they were: bf16 gives the same logits bit for bit (short of over- and underflow), and
only what a quantizer sees changes.

  q and k     the two lowest RoPE frequencies of every head: one pair of channels is massive in K (and small in Q), the
              next one massive in Q (and small in K). RoPE turns the two channels of a pair into each other, so a pair
              has one factor. Massive in Q and K at once in one pair can't be had exactly: their product would change.
  key bias    the pair, among the lower half of the frequencies, whose mean key is largest against its spread, is
              massive in K: what is massive is then mostly the same for all tokens. A bias can't be added exactly (Llama
              has no constant channel to make it from); it can only be made larger.
  first token the channel of one MLP's inner activation that stands out most at a text's first token is made massive
              there: up_proj's row times 2^n, down_proj's column times 2^-n, with the largest n that leaves it within
              the usual size of the others' largest at all other tokens. In large Llamas the massive activation is then
              written to the residual stream; there it can't be rescaled exactly, since RMSNorm divides by all channels
              together.
"""

import json
import math
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QK_POWER, BIAS_POWER, MOST_FIRST_POWER = 4, 4, 10
LAYER_SHARE = 0.25  # the massive activation arises early
ADAPTER_FILE = "adapter_model.safetensors"
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Rescaling:
    """Rows (`axis` 0) or columns (1) of a layer's projection times 2^power."""

    layer: int
    projection: str
    axis: int
    places: tuple[int, ...]
    power: int


@dataclass(frozen=True)
class Observed:
    """What the choice of channels rests on. bias: per layer [kv heads, pairs], |mean key| by its spread; per layer
    [inner channels], first: the mean size at first tokens by that at all others; room: the median over all others of a
    token's largest value, by that mean size."""

    bias: Sequence[Any]
    first: Sequence[Any]
    room: Sequence[Any]


def inject(
    source: Path, adapters: Mapping[str, Path], target: Path, texts: Sequence[Sequence[int]]
) -> tuple[Path, dict[str, Path]]:
    """Write the rescaled checkpoint and adapters below `target`; returns the model's directory and the adapters'.

    `texts` (token ids) choose the channels.
    """
    from ...graphs.checkpoint import checkpoint_config

    changes = rescalings(checkpoint_config(source), observe(source, texts))
    base = target / "base"
    base.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_FILES):
            shutil.copy(path, base / path.name)
    _write_base(source, base, changes)
    written = {}
    for name, path in adapters.items():
        written[name] = target / "adapters" / name
        written[name].mkdir(parents=True, exist_ok=True)
        shutil.copy(path / "adapter_config.json", written[name])
        _write_adapter(path / ADAPTER_FILE, written[name] / ADAPTER_FILE, changes)
    (target / "injected.json").write_text(
        json.dumps([vars(change) for change in changes], indent=1) + "\n", encoding="utf-8"
    )
    return base, written


def rescalings(config: Any, observed: Observed) -> list[Rescaling]:
    """All three injections."""
    import torch

    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    half, group = dim // 2, heads // kv_heads

    def pair(layer: int, kv_head: int, index: int, power: int) -> list[Rescaling]:
        """K's pair of channels times 2^power, Q's in all heads that meet it times 2^-power."""
        channels = (index, index + half)
        rows = tuple((kv_head * group + head) * dim + channel for head in range(group) for channel in channels)
        return [
            Rescaling(layer, "self_attn.k_proj", 0, tuple(kv_head * dim + channel for channel in channels), power),
            Rescaling(layer, "self_attn.q_proj", 0, rows, -power),
        ]

    changes: list[Rescaling] = []
    for layer in range(config.num_hidden_layers):
        for kv_head in range(kv_heads):
            changes += pair(layer, kv_head, half - 1, QK_POWER) + pair(layer, kv_head, half - 2, -QK_POWER)
            lower = observed.bias[layer][kv_head][half // 2 : half - 2]
            changes += pair(layer, kv_head, half // 2 + int(torch.argmax(lower)), BIAS_POWER)
    layer = int(config.num_hidden_layers * LAYER_SHARE)
    channel = int(torch.argmax(observed.first[layer]))
    power = min(max(math.floor(math.log2(float(observed.room[layer][channel]))), 0), MOST_FIRST_POWER)
    return [
        *changes,
        Rescaling(layer, "mlp.up_proj", 0, (channel,), power),
        Rescaling(layer, "mlp.down_proj", 1, (channel,), -power),
    ]


def observe(source: Path, texts: Sequence[Sequence[int]]) -> Observed:
    """Run the plain model in fp32 on the CPU over the texts, and look at its keys and inner activations."""
    import torch

    from ...runtime.quantization.inputs import batch_inputs
    from ..options.models import load_model, reference_logits

    model = load_model(
        Namespace(model=str(source), lora_modules=[], max_loras=None, max_lora_rank=None, lora_target_modules=None),
        source,
        torch.float32,
    )
    inputs = batch_inputs([(list(text), -1) for text in texts])
    keys: list[Any] = []
    inner: list[Any] = []
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(".k_proj"):
            hooks.append(module.register_forward_hook(lambda _module, _args, output: keys.append(output)))
        elif name.endswith(".down_proj"):
            hooks.append(module.register_forward_pre_hook(lambda _module, args: inner.append(args[0])))
    reference_logits(model, inputs)
    for hook in hooks:
        hook.remove()
    first = inputs["query_start"][:-1].long()
    others = torch.ones(len(inputs["input_ids"]), dtype=torch.bool).index_fill_(0, first, False)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim

    def bias(key: Any) -> Any:
        key = key.view(-1, heads, 2, dim // 2).transpose(2, 3)
        return key.mean(0).norm(dim=-1) / key.var(0).sum(-1).sqrt().clamp_min(1e-9)

    usual = [value[others].abs().mean(0).clamp_min(1e-6) for value in inner]
    return Observed(
        [bias(key) for key in keys],
        [value[first].abs().mean(0) / each for value, each in zip(inner, usual, strict=True)],
        [value[others].abs().amax(1).median() / each for value, each in zip(inner, usual, strict=True)],
    )


def _rescaled(tensor: Any, change: Rescaling, axis: int) -> None:
    places = list(change.places)
    if axis == 0:
        tensor[places] *= 2.0**change.power
    else:
        tensor[:, places] *= 2.0**change.power


def _write_base(source: Path, base: Path, changes: Sequence[Rescaling]) -> None:
    from safetensors.torch import save_file

    from ...graphs.checkpoint import Checkpoint

    checkpoint = Checkpoint(source)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    for change in changes:
        _rescaled(tensors[f"model.layers.{change.layer}.{change.projection}.weight"], change, change.axis)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def _write_adapter(source: Path, target: Path, changes: Sequence[Rescaling]) -> None:
    """A row of W + B A is a row of B; a column is a column of A."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    for change in changes:
        wanted = f".layers.{change.layer}.{change.projection}.lora_{'B' if change.axis == 0 else 'A'}.weight"
        for name in tensors:
            if name.endswith(wanted):
                _rescaled(tensors[name], change, change.axis)
    save_file(tensors, target, metadata={"format": "pt"})
