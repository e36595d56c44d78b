"""Statistics of a model's keys, values and channels, and errors of quantized KV caches, for `sidestream calibrate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from ...compiler.graph.materialize import key_balance_factors
from ...compiler.passes.quantize.smooth_channels import channel_exponents_name
from ...ops.attention.append_kv import append_kv
from ...ops.attention.paged_attention import paged_attention
from ...ops.core.kv_layout import PAGE_SIZE, kv_cache_shape
from .calibration import KV_DTYPES, MAX_EXPONENT, TREATMENTS, Calibration, LayerStatistics
from .kv_error import attention_weights, outliers, score_variance, value_error

# module that makes or reads smoothed channels -> linears that read them (none: the head)
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "norm": (),
    "down_proj": ("down_proj",),
}
# share of a channel's excess that moves to the weights; measured on SmolLM2
SHARES = {"input_layernorm": 0.65, "post_attention_layernorm": 0.65, "norm": 0.5, "down_proj": 0.5}


@dataclass
class Sums:
    """Sums of one layer: over tokens in the first run, over pieces of text in the second."""

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
        """Return the mean key [kv heads, head dim] in fp32."""
        return (self.key / self.tokens).float()

    def add(self, k: Any, v: Any) -> None:
        """Add sizes and means of keys and values [T, HK, D]."""
        self.tokens += len(k)
        self.key = self.key + k.double().sum(0)
        self.key_square += float(k.double().square().sum())
        self.key_amax = max(self.key_amax, float(k.abs().max()))
        self.value_amax = max(self.value_amax, float(v.abs().max()))
        self.key_outliers += outliers(k) * len(k)
        self.value_outliers += outliers(v) * len(v)

    def simulate(self, q: Any, k: Any, v: Any, softmax_scale: float) -> None:
        """Add the errors of one piece for every cache dtype and treatment."""
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

    def result(self) -> LayerStatistics:
        """Return the statistics."""
        bias = self.tokens * float((self.key / self.tokens).square().sum()) / max(self.key_square, 1e-30)
        return LayerStatistics(
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
    """Return the Calibration of a plain Llama, with adapter i in slot i, from (token ids, slot) pairs.

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
                        layer.add(k, v)
                bar.update()
    channels.remove()
    # undo the balancing
    centers = [(layer.center() / factor).cpu() for layer, factor in zip(layers, factors, strict=True)]
    statistics = [layer.result() for layer in layers]
    return Calibration(mark, statistics, centers, layers[0].tokens, tuple(names), exponents(model, channels.largest))


class ChannelSizes:
    """Records the largest magnitude of every channel after each norm and before each down_proj, until `remove`.

    Channels of experts are not smoothed: all experts of a layer would have to share their exponents.
    """

    def __init__(self, model: Any) -> None:
        self.largest: dict[str, torch.Tensor] = {}
        self._hooks = []
        for name, module in model.named_modules():
            owner, _, leaf = name.rpartition(".")
            if ".experts" in owner or (leaf == "post_attention_layernorm" and model.get_submodule(owner).sparse):
                continue
            if leaf == "down_proj":
                self._hooks.append(module.register_forward_pre_hook(partial(self._record_input, name)))
            elif leaf in READERS:
                self._hooks.append(module.register_forward_hook(partial(self._record_output, name)))

    def _record_input(self, name: str, module: Any, arguments: Any) -> None:
        self._record(name, arguments[0])

    def _record_output(self, name: str, module: Any, arguments: Any, output: Any) -> None:
        self._record(name, output)

    def _record(self, name: str, value: torch.Tensor) -> None:
        sizes = value.float().abs().flatten(0, -2).amax(0)
        self.largest[name] = torch.maximum(self.largest.get(name, sizes), sizes)

    def remove(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()


def exponents(model: Any, largest: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return name -> int8 [channels]: exponents of two by which channels after norms and before down_proj are divided.

    As in SmoothQuant, from the largest magnitudes of a channel and of its weight column, both relative to the median.
    With a share of one half both become equal; a larger share (`SHARES`) moves more to the weights.
    """
    found = {}
    for name, sizes in largest.items():
        owner, _, leaf = name.rpartition(".")
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        readers = [model.get_submodule(owner).get_submodule(reader) for reader in READERS[leaf]] or [head]
        columns = torch.stack([reader.weight.detach().abs().amax(0).float() for reader in readers]).amax(0)
        powers = (SHARES[leaf] * _by_median(sizes).log2() - (1 - SHARES[leaf]) * _by_median(columns).log2()).round()
        powers = powers.clamp(-MAX_EXPONENT, MAX_EXPONENT)
        found[channel_exponents_name(f"{name}.weight")] = powers.to(torch.int8).cpu()
    return found


def _by_median(sizes: torch.Tensor) -> torch.Tensor:
    return (sizes / sizes.median().clamp_min(1e-12)).clamp_min(1e-6)


def _balance(layer: Any, config: Any) -> Any:
    """Return the factors of a layer's keys [kv heads, head dim], see the pass `balance_keys`."""
    attention = layer.self_attn
    weights = attention.q_proj.weight.detach(), attention.k_proj.weight.detach(), layer.input_layernorm.weight.detach()
    factors = key_balance_factors(*weights, config.num_key_value_heads, config.head_dim)
    return torch.cat((factors, factors), dim=-1)


def attention_inputs(model: Any, ids: Sequence[int], slot: int, device: Any) -> list[tuple[Any, Any, Any]]:
    """Return (q, k after RoPE, v) of every layer for one sequence, in the model's dtype."""
    appended: list[tuple[Any, Any]] = []
    queries: list[Any] = []

    class Recorder(TorchDispatchMode):
        """Records the arguments of the two ops."""

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


def batch_inputs(batch: Sequence[tuple[Sequence[int], int]]) -> dict[str, Any]:
    """Return the inputs of one prefill of (token ids, adapter slot) pairs, without KV caches. Page 0 is not used."""
    lengths = [len(ids) for ids, _ in batch]
    blocks = max(-(-length // PAGE_SIZE) for length in lengths)

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    first = [(1 + row * blocks) * PAGE_SIZE for row in range(len(batch))]
    return {
        "input_ids": torch.tensor([token for ids, _ in batch for token in ids]),
        "positions": torch.tensor([position for length in lengths for position in range(length)]),
        "slot_mapping": integers(
            [start + position for start, length in zip(first, lengths, strict=True) for position in range(length)]
        ),
        "adapter_index": integers([slot for ids, slot in batch for _ in ids]),
        "block_table": torch.arange(1, 1 + len(batch) * blocks, dtype=torch.int32).view(len(batch), blocks),
        "context_lens": integers(lengths),
        "query_start": integers([sum(lengths[:row]) for row in range(len(batch) + 1)]),
        "logits_indices": torch.arange(sum(lengths), dtype=torch.int32),
    }
