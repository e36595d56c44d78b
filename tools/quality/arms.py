"""The arms of `sidestream eval`: named sets of engine options, each a way to serve the same model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ...compiler.passes.quantize.smooth_channels import channel_exponents_name

REFERENCE = "bf16"
DEFAULT = "int8"
UNFUSED = "bf16-unfused"
FUSIONS = (
    "lift_rms_norm",
    "lift_rope_angles",
    "lift_rope",
    "pack_projections",
    "fuse_silu_mul",
    "fuse_add_rms_norm",
    "fuse_rope_append",
)


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    options   arguments of `LLM` besides model and adapters
    about     one line for the tables
    passes    name of a function of `emulation` that makes the pass list
    weights   name of a function of `emulation` that edits the loaded weights in place
    control   it must fail the verdict: if it does not, the measurement sees nothing
    eager     its ops can't be captured in a CUDA graph
    slow      its ops are references: it runs on a part of the items
    calibrated  it needs the model's calibration
    unsmoothed  the projection whose input its calibration leaves as it is
    automatic   it has what the engine itself calibrates when it first starts; the others have nothing of it
    rounded     it needs weights that were rounded with its options
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    passes: str = "plain"
    weights: str = ""
    control: bool = False
    eager: bool = False
    slow: bool = False
    calibrated: bool = False
    rounded: bool = False
    unsmoothed: str = ""
    automatic: bool = False

    def smoothed(self, calibration: Any) -> Any:
        """The calibration as this arm takes it."""
        if calibration is None or not self.unsmoothed:
            return calibration
        end = channel_exponents_name(self.unsmoothed)
        kept = {name: each for name, each in calibration.channel_exponents.items() if not name.endswith(end)}
        return replace(calibration, channel_exponents=kept)


def _int8(name: str, about: str, calibrated: bool = False, rounded: bool = False, **options: Any) -> Arm:
    chosen = MappingProxyType({"precision": "int8", **options})
    return Arm(name, about, chosen, calibrated=calibrated, rounded=rounded)


def _fp8(name: str, about: str, calibrated: bool = False, rounded: bool = False, **options: Any) -> Arm:
    chosen = MappingProxyType({"precision": "fp8", **options})
    return Arm(name, about, chosen, calibrated=calibrated, rounded=rounded)


TENSORWISE: Mapping[str, Any] = MappingProxyType(
    {
        "precision": "fp8",
        "kv_dtype": "fp8_e4m3",
        "hadamard": False,
        "whole_layer": "off",
        "lora_dtype": "bf16",
        "disable_passes": ("fuse_quantize",),
    }
)

# what other engines leave in 16 bits
PEER: Mapping[str, Any] = MappingProxyType(
    {"kv_dtype": "bf16", "lm_head": "bf16", "lora_dtype": "bf16", "whole_layer": "off"}
)

ARMS: tuple[Arm, ...] = (
    Arm(REFERENCE, "nothing quantized: what all others are compared with", MappingProxyType({"precision": "bf16"})),
    Arm(
        UNFUSED,
        "nothing quantized, and every fusion left out: rounded where PyTorch's own modules round",
        MappingProxyType({"precision": "bf16", "disable_passes": FUSIONS}),
    ),
    _int8(
        DEFAULT,
        "the default: weights, activations, adapters and cache in int8, one scale per row, rotated; PV in 16 bits",
    ),
    _int8("int8-not-rotated", "activations and weights are not rotated", rotate_activations=False),
    _int8("int8-no-hadamard", "the default without the Hadamard transform of Q and K", hadamard=False),
    _int8("int8-not-balanced", "the default with K and Q as large as the weights make them", balance_keys=False),
    _int8(
        "int8-centred",
        "the default with calibrated constants subtracted from K",
        kv_dtype="int8",
        hadamard=True,
        center_keys=True,
        calibrated=True,
    ),
    Arm(
        "int8-auto",
        "what an engine on a GPU calibrates and rounds by itself when it first starts, for the base model alone",
        MappingProxyType({"precision": "int8"}),
        automatic=True,
    ),
    Arm(
        "int8-auto-logits-bf16",
        "the same with logits in bf16 instead of fp16",
        MappingProxyType({"precision": "int8", "finer_logits": False}),
        automatic=True,
    ),
    Arm(
        "int8-auto-residual-bf16",
        "the same with the residual stream in bf16 instead of fp16",
        MappingProxyType({"precision": "int8", "finer_residual": False}),
        automatic=True,
    ),
    _int8("int8-rotated-8", "norms rotated by 8 columns instead of 64", norm_rotation=8),
    _int8("int8-calibrated", "what `sidestream calibrate` chooses for each layer", calibrated=True),
    _int8("int8-calibrated-not-smoothed", "the same without smoothed channels", smooth_channels=False, calibrated=True),
    Arm(
        "int8-calibrated-norms-smoothed",
        "the same with channels smoothed after norms only, not before down_proj",
        MappingProxyType({"precision": "int8"}),
        calibrated=True,
        unsmoothed="down_proj",
    ),
    Arm(
        "int8-least-squares",
        "the default with the scale of each row of a weight chosen by the least squared error",
        MappingProxyType({"precision": "int8"}),
        weights="least_squares_weights",
    ),
    _int8("int8-rounded", "the default with weights as `sidestream calibrate --round` rounds them", rounded=True),
    _int8(
        "int8-calibrated-rounded",
        "what `sidestream calibrate --round` chooses for each layer, and its weights, heads of V not rotated",
        calibrated=True,
        rounded=True,
    ),
    _int8(
        "int8-calibrated-rounded-values",
        "the same with each head of V rotated (folded into the weights): what `sidestream calibrate --round` writes",
        rotate_values=True,
        calibrated=True,
        rounded=True,
    ),
    _int8(
        "int8-calibrated-rounded-lm-head-bf16",
        "the same with the output projection in 16 bits",
        rotate_values=True,
        lm_head="bf16",
        calibrated=True,
        rounded=True,
    ),
    _int8(
        "int8-rotated-values", "the default with each head of V rotated (folded into the weights)", rotate_values=True
    ),
    _int8("int8-kv-e4m3", "an e4m3 cache", kv_dtype="fp8_e4m3"),
    _int8("int8-kv-bf16", "the cache is not quantized", kv_dtype="bf16"),
    _int8("int8-lora-bf16", "adapters and their input in 16 bits", lora_dtype="bf16"),
    _int8("int8-lora-input-bf16", "adapters in int8, their input in 16 bits", lora_dtype="int8", lora_input="bf16"),
    _int8("int8-lm-head-bf16", "the output projection is not quantized", lm_head="bf16"),
    _int8(
        "int8-whole-layer",
        "decode steps with one launch a layer: one scale per token and 128 columns",
        whole_layer="on",
    ),
    _fp8("fp8", "e4m3 with one scale per row, e4m3 cache, Hadamard, adapters in 16 bits, PV in 16 bits"),
    _fp8("fp8-rounded", "the same with weights as `sidestream calibrate --round` rounds them", rounded=True),
    _fp8("fp8-no-hadamard", "the same without the Hadamard transform of Q and K", hadamard=False),
    _fp8(
        "fp8-centred",
        "the same with calibrated constants subtracted from K",
        kv_dtype="fp8_e4m3",
        hadamard=True,
        center_keys=True,
        calibrated=True,
    ),
    _fp8(
        "fp8-centred-no-hadamard",
        "K centred, not transformed",
        kv_dtype="fp8_e4m3",
        hadamard=False,
        center_keys=True,
        calibrated=True,
    ),
    _fp8("fp8-kv-int8", "an int8 cache, Hadamard", kv_dtype="int8"),
    _fp8("fp8-kv-int8-no-hadamard", "an int8 cache, no Hadamard", kv_dtype="int8", hadamard=False),
    _fp8(
        "fp8-kv-int8-rotated",
        "an int8 cache, Hadamard, each head of V rotated (folded into the weights)",
        kv_dtype="int8",
        rotate_values=True,
    ),
    _fp8("fp8-kv-bf16", "the cache is not quantized", kv_dtype="bf16"),
    _fp8("fp8-rotated", "each head of V rotated (folded into the weights)", rotate_values=True),
    _fp8("fp8-lora-fp8", "adapters and their input in e4m3, one scale per row", lora_dtype="fp8", lora_input="fp8"),
    _fp8("fp8-lora-input-bf16", "adapters in e4m3, their input in 16 bits", lora_dtype="fp8", lora_input="bf16"),
    _fp8(
        "fp8-whole-layer",
        "decode steps without LoRA with one launch a layer: one scale per token and 128 columns",
        whole_layer="on",
    ),
    Arm(
        "fp8-tensorwise",
        "one scale per tensor for weights and activations, adapters in 16 bits, as peers do (emulated)",
        TENSORWISE,
        passes="with_tensorwise",
        weights="tensorwise_weights",
    ),
    Arm(
        "fp8-tensorwise-hadamard",
        "the same with the Hadamard transform",
        MappingProxyType({**TENSORWISE, "hadamard": True}),
        passes="with_tensorwise",
        weights="tensorwise_weights",
    ),
    _int8(
        "peer-int8",
        "W8A8 as other engines have it: int8 with one scale per row, nothing rotated; head, cache, adapters in 16 bits",
        rotate_activations=False,
        **PEER,
    ),
    _fp8("peer-fp8-rowwise", "e4m3 with one scale per row; head, cache and adapters in 16 bits", **PEER),
    Arm(
        "peer-fp8",
        "e4m3, one scale per weight tensor and one per token, e4m3 cache without scales; head and adapters in 16 bits",
        MappingProxyType({"precision": "fp8", **PEER, "disable_passes": ("fuse_rope_append",)}),
        passes="with_unscaled_cache",
        weights="tensorwise_weights",
    ),
    Arm(
        "control-wrong-scale",
        "a fault: one layer's weight scale is four times what it should be",
        MappingProxyType({"precision": "int8"}),
        weights="wrong_scale",
        control=True,
    ),
    Arm(
        "control-one-sided-hadamard",
        "a fault: K is transformed, Q is not",
        MappingProxyType({"precision": "int8", "hadamard": True, "disable_passes": ("fuse_rope_append",)}),
        passes="with_one_sided_hadamard",
        control=True,
    ),
    Arm(
        "control-fp8-pv",
        "PV in FP8 with the tensor cores' short sums (emulated), which long contexts show",
        MappingProxyType({"precision": "int8", "whole_layer": "off", "disable_passes": ("fuse_quantize",)}),
        passes="with_fp8_pv",
        control=True,
        eager=True,
        slow=True,
    ),
)
BY_NAME = {arm.name: arm for arm in ARMS}
# asked everything; the others, which vary one of these, a part
WHOLE = (REFERENCE, UNFUSED, DEFAULT, "fp8", "fp8-tensorwise")
# the same in the injected round, whose question is which arms fall behind
WHOLE_INJECTED = (REFERENCE, UNFUSED, DEFAULT)
SMOKE = (DEFAULT, "fp8", "fp8-tensorwise")
SMOKE_CONTROLS = ("control-wrong-scale", "control-one-sided-hadamard")
INJECTED = (
    UNFUSED,
    DEFAULT,
    "int8-not-balanced",
    "int8-not-rotated",
    "int8-no-hadamard",
    "int8-centred",
    "fp8",
    "fp8-no-hadamard",
    "fp8-tensorwise",
)


def chosen_arms(names: Sequence[str], with_controls: bool) -> list[Arm]:
    """The arms to compare with the reference, by name (none: all), in the order of `ARMS`.

    Raises ValueError for a name that is none.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--arms names {unknown[0]!r}, which is no arm; arms: {', '.join(BY_NAME)}")
    return [
        arm
        for arm in ARMS
        if arm.name != REFERENCE
        and (arm.name in names or (not names and not arm.control) or (arm.control and with_controls))
    ]


def open_arm(
    arm: Arm, model: Any, adapters: Mapping[str, Any], calibration: Any = None, rounded: Any = None, **sizes: Any
) -> Any:
    """An `LLM` of this arm, on which programs besides the engine's own may be run after its last request.

    `calibration`, `rounded` (a file): for the arms that need them.
    """
    from ...runtime.llm import LLM
    from . import emulation

    passes: Callable[[], Any] = getattr(emulation, arm.passes)
    if arm.rounded and rounded is None:
        raise ValueError(f"the weights of {arm.name} were not rounded")
    own: dict[str, Any] = {}
    if not arm.automatic:
        own["calibration"] = arm.smoothed(calibration) if arm.calibrated else "off"
        own["rounded_weights"] = rounded if arm.rounded else "off"
    llm = LLM(
        model, adapters, passes=passes(), show_progress=False, enforce_eager=True, **{**arm.options, **own, **sizes}
    )
    runner: Any = llm.engine.runner
    if llm.device.type == "cuda":  # few programs, each captured when it is met again: the start takes seconds
        runner.buckets = replace(runner.buckets, rounded=True)
        runner.captures = not arm.eager
    if arm.weights:
        edit: emulation.WeightEdit = getattr(emulation, arm.weights)
        edit(runner.tensors, llm.compiled.recipes, _lookup(llm, model))
    return llm


def _lookup(llm: Any, directory: Any) -> Callable[[str], Any]:
    from ...graphs.checkpoint import Checkpoint

    checkpoint = Checkpoint(directory)
    return lambda name: checkpoint.tensor(name).to(device=llm.device, dtype=llm.compiled.options.model_dtype)
