"""What a model's keys and values are like, and what a quantized KV cache would do to them: the figures that
`sidestream calibrate` decides by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from ...compiler.graph.recipe import key_balance_factors
from ...compiler.passes.quantize.smooth_channels import channel_exponents_name
from ...ops.attention.append_kv import append_kv
from ...ops.attention.paged_attention import paged_attention
from ...ops.core.kv_layout import kv_cache_shape
from .calibration import KV_DTYPES, MOST_EXPONENT, TREATMENTS, Calibration, LayerFigures
from .inputs import batch_inputs
from .kv_error import attention_weights, outliers, score_variance, value_error

# what makes or reads channels that are smoothed, by its name -> the linears next to it that read them (none: the head)
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "norm": (),
    "down_proj": ("down_proj",),
}
# how much of what a channel stands out by goes to the weights, the rest stays with the activations
SHARES = {"input_layernorm": 0.65, "post_attention_layernorm": 0.65, "norm": 0.5, "down_proj": 0.5}


@dataclass
class Sums:
    """What is added up for a layer: over the tokens in the first run, over pieces in the second."""

    tokens: int = 0
    key: Any = 0.0
    key_square: float = 0.0
    key_amax: float = 0.0
    value_amax: float = 0.0
    key_outliers: float = 0.0
    value_outliers: float = 0.0
    queries: int = 0
    score: dict[tuple[str, bool, bool], float] = field(default_factory=dict)
    value: dict[tuple[str, bool], float] = field(default_factory=dict)
    output_square: float = 0.0

    def center(self) -> Any:
        """The mean key [kv heads, head dim] in fp32."""
        return (self.key / self.tokens).float()

    def look(self, k: Any, v: Any) -> None:
        """Keys and values [T, HK, D] of one piece: sizes and means."""
        self.tokens += len(k)
        self.key = self.key + k.double().sum(0)
        self.key_square += float(k.double().square().sum())
        self.key_amax, self.value_amax = (
            max(self.key_amax, float(k.abs().max())),
            max(self.value_amax, float(v.abs().max())),
        )
        self.key_outliers += outliers(k) * len(k)
        self.value_outliers += outliers(v) * len(v)

    def simulate(self, q: Any, k: Any, v: Any, softmax_scale: float) -> None:
        """Errors of one piece for every cache dtype and treatment."""
        weights = attention_weights(q, k, softmax_scale)
        self.queries += len(q)
        for kv_dtype in KV_DTYPES:
            for hadamard, centered in TREATMENTS:
                center = self.center() if centered else None
                variance = score_variance(
                    q, k, softmax_scale, kv_dtype, hadamard=hadamard, center=center, weights=weights
                )
                key = (kv_dtype, hadamard, centered)
                self.score[key] = self.score.get(key, 0.0) + variance * len(q)
            for rotated in (False, True):
                error, square = value_error(v, weights, kv_dtype, rotated=rotated)
                self.value[kv_dtype, rotated] = self.value.get((kv_dtype, rotated), 0.0) + error
        self.output_square += square

    def figures(self) -> LayerFigures:
        """What the sums come to."""
        bias = self.tokens * float((self.key / self.tokens).square().sum()) / max(self.key_square, 1e-30)
        return LayerFigures(
            {key: (total / self.queries) ** 0.5 for key, total in self.score.items()},
            {key: (total / max(self.output_square, 1e-30)) ** 0.5 for key, total in self.value.items()},
            self.key_amax,
            self.value_amax,
            self.key_outliers / self.tokens,
            self.value_outliers / self.tokens,
            bias,
        )


def calibrate(
    model: Any,
    jobs: Sequence[tuple[Sequence[int], int]],
    device: Any,
    mark: str,
    names: Sequence[str],
    progress: bool = False,
) -> Calibration:
    """The `Calibration` of our plain Llama (with adapter i in slot i) from (token ids, slot) pairs.

    `mark`: the model's fingerprint.
    """
    layers = [Sums() for _ in range(model.config.num_hidden_layers)]
    factors = [_balance(layer, model.config) for layer in model.model.layers]
    scales = [model.config.softmax_scale_of(layer) for layer in range(model.config.num_hidden_layers)]
    channels = ChannelSizes(model)
    with tqdm(total=2 * len(jobs), desc="Calibrating", unit="run", disable=not progress, leave=False) as bar:
        for second in (False, True):
            for ids, slot in jobs:
                for layer, factor, softmax_scale, (q, k, v) in zip(
                    layers, factors, scales, attention_inputs(model, ids, slot, device), strict=True
                ):
                    k, q = k * factor, q / factor.repeat_interleave(q.shape[1] // k.shape[1], dim=0)
                    if second:
                        layer.simulate(q, k, v, softmax_scale)
                    else:
                        layer.look(k, v)
                bar.update()
    channels.remove()
    # of keys as the model makes them
    centers = [(layer.center() / factor).cpu() for layer, factor in zip(layers, factors, strict=True)]
    figures = [layer.figures() for layer in layers]
    return Calibration(mark, figures, centers, layers[0].tokens, tuple(names), exponents(model, channels.largest))


class ChannelSizes:
    """The largest magnitude of every channel that each norm makes and each down_proj reads, from now until `remove`."""

    def __init__(self, model: Any) -> None:
        self.largest: dict[str, torch.Tensor] = {}
        self._hooks = []
        for name, module in model.named_modules():
            leaf = name.rpartition(".")[2]
            if leaf == "down_proj":
                self._hooks.append(module.register_forward_pre_hook(partial(self._look_before, name)))
            elif leaf in READERS:
                self._hooks.append(module.register_forward_hook(partial(self._look_after, name)))

    def _look_before(self, name: str, module: Any, arguments: Any) -> None:
        self._look(name, arguments[0])

    def _look_after(self, name: str, module: Any, arguments: Any, output: Any) -> None:
        self._look(name, output)

    def _look(self, name: str, value: torch.Tensor) -> None:
        sizes = value.float().abs().flatten(0, -2).amax(0)
        self.largest[name] = torch.maximum(self.largest.get(name, sizes), sizes)

    def remove(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()


def exponents(model: Any, largest: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name -> int8 [channels]: what each channel after a norm, or before a down_proj, is divided by, as a power of two.

    A channel's size is its largest magnitude over the text, and so is its weight column's over all rows, each by its
    median. With SmoothQuant's share of one half, the square root of their ratio, both become alike; a larger share
    leaves more of it to the weights (`SHARES`, as measured on SmolLM2).
    """
    found = {}
    for name, sizes in largest.items():
        owner, _, leaf = name.rpartition(".")
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        readers = [model.get_submodule(owner).get_submodule(reader) for reader in READERS[leaf]] or [head]
        columns = torch.stack([reader.weight.detach().abs().amax(0).float() for reader in readers]).amax(0)
        powers = (SHARES[leaf] * _by_median(sizes).log2() - (1 - SHARES[leaf]) * _by_median(columns).log2()).round()
        powers = powers.clamp(-MOST_EXPONENT, MOST_EXPONENT)
        found[channel_exponents_name(f"{name}.weight")] = powers.to(torch.int8).cpu()
    return found


def _by_median(sizes: torch.Tensor) -> torch.Tensor:
    return (sizes / sizes.median().clamp_min(1e-12)).clamp_min(1e-6)


def _balance(layer: Any, config: Any) -> Any:
    """[kv heads, head dim]: the factors of a layer's keys (see the pass `balance_keys`)."""
    attention = layer.self_attn
    weights = attention.q_proj.weight.detach(), attention.k_proj.weight.detach(), layer.input_layernorm.weight.detach()
    factors = key_balance_factors(*weights, config.num_key_value_heads, config.head_dim)
    return torch.cat((factors, factors), dim=-1)


def attention_inputs(model: Any, ids: Sequence[int], slot: int, device: Any) -> list[tuple[Any, Any, Any]]:
    """q, k (after RoPE) and v of every layer for one sequence, in the model's dtype."""
    appended: list[tuple[Any, Any]] = []
    queries: list[Any] = []

    class Recorder(TorchDispatchMode):
        """Keeps what the two ops are given."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is append_kv.overload:
                appended.append((args[0].clone(), args[1].clone()))
            elif func is paged_attention.overload:
                queries.append(args[0].clone())
            return func(*args, **(kwargs or {}))

    inputs = {name: value.to(device) for name, value in batch_inputs([(ids, slot)]).items()}
    inputs["logits_indices"] = inputs["logits_indices"][-1:]
    config, pages = model.config, int(inputs["block_table"].max()) + 1
    shape = kv_cache_shape(pages, config.num_key_value_heads, config.head_dim)
    caches = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.num_hidden_layers)]
    with torch.no_grad(), Recorder():
        model(**inputs, kv_caches=caches)
    return [(q, k, v) for q, (k, v) in zip(queries, appended, strict=True)]
