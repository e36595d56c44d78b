"""Expected number of matches of each pass. A pattern that stops matching fails the compilation."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .graph.layer_names import LAYER
from .options import CompileOptions

_LORA = re.compile(r"lora_a\b|lora_a[._]", re.IGNORECASE)
_PART = re.compile(r"\.lora_(gain|shift)$")
_PROJECTION = re.compile(r"(qkv|gate_up|q|k|v|o|gate|up|down)_proj")
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj\b")
_ROUTER = re.compile(r"\.mlp\.gate\b")
_BIAS = re.compile(r"bias\b|bias_?$")
_HEAD_NORM = re.compile(r"(q|k)_norm")
_PACKED_WITH = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


class PassCountError(RuntimeError):
    """A pass has another number of matches than the model's shape implies."""


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model that determine the counts.

    layers       decoder layers
    lora_linears projections with LoRA; packed_lora: their number after q/k/v and gate/up are packed
    paged        attention reads a paged cache (our Llama), not ATen's attention (transformers)
    biases       projections with a bias, less those in which the module itself adds it to a `lora_adjust`
    head_norms   norms of the heads of q and k
    packed       the module itself packs q/k/v and gate/up (transformers' Phi-3)
    unrotated    layers without RoPE
    stored       projections stored in eight bits
    lora_head, lora_embedding  the output head or the embedding has LoRA
    sparse       layers with experts; lora_routers, lora_experts: routers and linears of experts with LoRA
    lora_qkv, lora_gate_up  layers with LoRA on q/k/v, and on gate/up
    """

    layers: int
    lora_linears: int
    packed_lora: int
    paged: bool
    biases: int = 0
    head_norms: int = 0
    packed: bool = False
    unrotated: int = 0
    stored: int = 0
    lora_head: bool = False
    lora_embedding: bool = False
    sparse: int = 0
    lora_routers: int = 0
    lora_experts: int = 0
    lora_qkv: int = 0
    lora_gate_up: int = 0

    @property
    def dense(self) -> int:
        """Layers without experts."""
        return self.layers - self.sparse

    @property
    def linears(self) -> int:
        """Linears of all layers before packing; an expert's gate and up are one."""
        return 7 * self.dense + 6 * self.sparse

    @property
    def mixed(self) -> bool:
        """Whether some projections are stored in eight bits and some in 16."""
        return 0 < self.stored < self.linears


def model_shape(names: Iterable[str], paged: bool, negations: int = 0) -> ModelShape | None:
    """Return the shape of a model from its parameter and buffer names; None for names without layers.

    Any spelling with `layers.N` and `q_proj` works. `negations`: number of negations in the graph. RoPE has two per
    layer; fewer (but not zero) mean that some layers have no RoPE.
    """
    names = list(names)
    sparse, routers, experts = set(), 0, 0
    layers: set[str] = set()
    projections: set[str] = set()
    adapted: set[tuple[str, str]] = set()
    biases: set[tuple[str, str]] = set()
    adjusted: set[tuple[str, str]] = set()
    head_norms: set[tuple[str, str]] = set()
    for name in names:
        layer = LAYER.search(name)
        if layer is None:
            continue
        layers.add(layer[1])
        of_experts, first_of_lora = _EXPERTS.search(name), name.endswith("lora_a")
        routers += first_of_lora and _ROUTER.search(name) is not None
        if of_experts is not None:
            sparse.add(layer[1])
            experts += first_of_lora
            continue
        projection = _PROJECTION.search(name)
        projections.update(projection.groups() if projection is not None else ())
        if projection is not None and _PART.search(name):
            adjusted.add((layer[1], projection[1]))
        elif projection is not None and _LORA.search(name):
            adapted.add((layer[1], projection[1]))
        elif projection is not None and _BIAS.search(name):
            biases.add((layer[1], projection[1]))
        head_norm = _HEAD_NORM.search(name)
        if head_norm is not None:
            head_norms.add((layer[1], head_norm[1]))
    packed = {(layer, _PACKED_WITH.get(projection, projection)) for layer, projection in adapted}
    stored = sum(name.endswith(".weight_scale") for name in names)
    counts = len(layers), len(adapted), len(packed), paged, len(biases - adjusted), len(head_norms)
    unrotated = len(layers) - negations // 2 if 0 < negations < 2 * len(layers) else 0
    more = [any(module in name and _LORA.search(name) for name in names) for module in ("lm_head", "embed_tokens")]
    if not layers or (sparse and not paged):  # how another library spells experts is unknown
        return None
    lora_layers = [sum(module == name for _, module in packed) for name in ("qkv", "gate_up")]
    experts_and_lora = len(sparse), routers, experts, *lora_layers
    return ModelShape(*counts, "qkv" in projections, unrotated, stored, more[0], more[1], *experts_and_lora)


@dataclass(frozen=True)
class Expectation:
    """A model's shape and the options: together they determine the count of each pass."""

    shape: ModelShape
    options: CompileOptions

    def on(self, *passes: str) -> bool:
        """Return whether all of `passes` are enabled."""
        return not set(passes) & set(self.options.disable)

    @property
    def packs(self) -> bool:
        """Whether projections that share their input are packed: fuse passes match only these."""
        return self.on("pack_projections") or self.shape.packed

    def unlifted(self, layers: int) -> int:
        """Return the layers, of `layers` with LoRA on some projections, in which it is no semantic op."""
        return 0 if self.on("lift_lora") else layers

    def count(self, name: str) -> int | None:
        """Return the expected number of matches of pass `name`; None if the model's shape does not determine it."""
        rule = COUNTS.get(name)
        if self.shape.biases and not self.on("lift_bias"):
            return None  # an unlifted bias prevents matches, depending on which projections have one
        return None if rule is None else rule(self)

    def check(self, name: str, matches: int, rejected: list[str]) -> None:
        """Raise PassCountError, with the reasons of near-misses, when `matches` is not the expected number."""
        expected = self.count(name)
        if expected is None or matches == expected:
            return
        reasons = "\n  ".join(rejected) or "there is no near-miss: the graph has no other op like the pattern's anchor"
        raise PassCountError(
            f"pass {name} matched {matches} times, but {self.shape.layers} layers imply {expected}; "
            f"refused:\n  {reasons}\n"
            f"Disable it with disable=({name!r},), or compile with check_counts=False to continue without the fusion."
        )


def _lora_branches(e: Expectation) -> int:
    if not e.on("lift_lora"):
        return 0
    return (e.shape.packed_lora if e.on("pack_projections") else e.shape.lora_linears) + e.shape.lora_head


def _lora_quantized(e: Expectation) -> int:
    return _lora_branches(e) + e.shape.lora_experts if e.options.quantizes_lora else 0


def _lora_lowered(e: Expectation) -> int:
    return _lora_branches(e) + e.shape.lora_experts + (e.shape.lora_routers if e.on("lift_lora") else 0)


def _linears(e: Expectation) -> int | None:
    if not e.options.quantizes:
        return 0
    if e.shape.lora_linears and not e.on("lift_lora"):
        return None  # peft's A and B are linears too
    return (4 * e.shape.layers if e.packs else e.shape.linears) + int(e.options.lm_head == "auto")


def _silu_fused(e: Expectation) -> int:
    return (e.shape.dense - e.unlifted(e.shape.lora_gate_up) if e.packs else 0) + e.shape.sparse


def _combined(e: Expectation) -> int:
    fused = e.options.tensor_parallel == 1 and e.on("lift_rms_norm", "fuse_add_rms_norm")
    return e.shape.sparse if fused else 0


def _quantize_fused(e: Expectation) -> int | None:
    """Return the number of both norms, SiLU * mul and attention in all layers, less those of disabled passes."""
    if not e.options.quantizes or not e.on("quantize_linears"):
        return 0
    if not e.shape.paged:
        # models differ in attention, and in the selection of rows after the last norm
        return None
    norms = 2 * e.shape.layers if e.on("lift_rms_norm") else 0
    silu = _silu_fused(e) if e.on("fuse_silu_mul") else 0
    return norms + silu + e.shape.layers


def _reductions_fused(e: Expectation) -> int | None:
    """Return the number of sums over the ranks, two per layer, less the last one.

    Rows are selected between the last norm and its quantization, so the last sum is not fused.
    """
    if e.options.tensor_parallel == 1 or not e.options.quantizes:
        return 0
    if not e.on("shard", "fuse_add_rms_norm", "quantize_linears", "fuse_quantize", "lift_rms_norm"):
        return 0
    return 2 * e.shape.layers - 1 if e.shape.paged else None


def _layers(e: Expectation, option: str) -> int:
    return sum(e.options.applies(option, layer) for layer in range(e.shape.layers))


def _values_rotated(e: Expectation) -> int | None:
    if not e.shape.paged or e.shape.mixed or (e.shape.lora_linears and not e.on("lift_lora")):
        return None
    return 0 if e.shape.stored else _layers(e, "rotate_values")


def _attention_matches(e: Expectation) -> bool:
    return e.packs and not e.unlifted(e.shape.lora_qkv)


def _rope_appended(e: Expectation) -> int:
    if not e.shape.paged or not _attention_matches(e) or (e.shape.head_norms and not e.on("lift_rms_norm")):
        return 0
    return e.shape.layers if e.on("lift_rope") else e.shape.unrotated


def _balanced(e: Expectation) -> int | None:
    if not (e.shape.paged and e.options.quantizes_kv and e.on("quantize_kv")):
        return 0
    matches = e.on("fuse_rope_append", "lift_rope", "lift_rms_norm") and _attention_matches(e)
    return _layers(e, "balance_keys") if matches else 0


def _smoothed(e: Expectation) -> int | None:
    if not e.options.smooth_channels or e.options.precision != "int8":
        return 0
    if not e.shape.paged or e.shape.mixed or not e.on("lift_rms_norm"):
        return None
    if e.shape.lora_linears and not e.on("lift_lora"):
        return None
    return (0 if e.shape.stored else 3 * e.shape.dense + e.shape.sparse) + int(e.options.lm_head == "auto")


def _rounded(e: Expectation) -> int | None:
    if not e.options.rounded_weights or not e.on("quantize_linears"):
        return 0
    linears = _linears(e)
    return None if e.shape.stored or linears is None else linears - 2 * e.shape.sparse


COUNTS: dict[str, Callable[[Expectation], int | None]] = {
    "lift_stored_weights": lambda e: e.shape.stored,
    "lift_bias": lambda e: e.shape.biases,
    "lift_embedding": lambda e: int(not e.shape.lora_embedding) if e.shape.paged else None,
    "lift_rms_norm": lambda e: 2 * e.shape.layers + 1 + e.shape.head_norms,
    "lift_rope_angles": lambda e: 1 if e.shape.paged else None,
    "lift_rope": lambda e: 2 * (e.shape.layers - e.shape.unrotated),
    "lift_lora": lambda e: e.shape.lora_linears + e.shape.lora_head + e.shape.lora_routers,
    "rotate_values": _values_rotated,
    "smooth_channels": _smoothed,
    "pack_projections": lambda e: 0 if e.shape.packed else e.shape.layers + e.shape.dense,
    "shard": lambda e: 2 * e.shape.layers + e.options.gather_logits if e.options.tensor_parallel > 1 else 0,
    "fuse_silu_mul": _silu_fused,
    "fuse_add_rms_norm": lambda e: 2 * e.shape.layers if e.on("lift_rms_norm") else 0,
    "quantize_kv": lambda e: e.shape.layers if e.shape.paged and e.options.quantizes_kv else 0,
    "center_keys": lambda e: (
        _layers(e, "center_keys") if e.shape.paged and e.options.quantizes_kv and e.on("quantize_kv") else 0
    ),
    "fuse_rope_append": _rope_appended,
    "balance_keys": _balanced,
    "quantize_linears": _linears,
    "use_rounded_weights": _rounded,
    "quantize_lora": _lora_quantized,
    "fuse_combine_norm": _combined,
    "fuse_quantize": _quantize_fused,
    "fuse_all_reduce_norm": _reductions_fused,
    "lower_experts": lambda e: 2 * e.shape.sparse,
    "lower_lora": _lora_lowered,
}
