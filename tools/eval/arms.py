"""Arms of `sidestream eval`: named sets of engine options, each a way to serve the same model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

REFERENCE = "bf16"
UNFUSED = "bf16-unfused"
DEFAULT = "int8"
AUTOMATIC = "int8-auto"
CALIBRATED, ROUNDED = "int8-calibrated", "int8-calibrated-rounded-values"
PEER_INT8, PEER_FP8 = "peer-int8", "peer-fp8-rowwise"
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

    options     arguments of `LLM` besides model and adapters
    about       one line for the tables
    calibrated  uses a calibration of the model and its adapters
    rounded     uses weights rounded with this arm's options
    automatic   keeps the calibration that an engine on a GPU makes at its first start
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    calibrated: bool = False
    rounded: bool = False
    automatic: bool = False


def _arm(name: str, about: str, precision: str, kind: str = "", **options: Any) -> Arm:
    chosen = MappingProxyType({"precision": precision, **options})
    return Arm(name, about, chosen, "calibrated" in kind, "rounded" in kind, kind == "automatic")


# other engines keep these in 16 bits
PEER: Mapping[str, Any] = MappingProxyType(
    {"kv_dtype": "bf16", "lm_head": "bf16", "lora_dtype": "bf16", "whole_layer": "off"}
)

ARMS: tuple[Arm, ...] = (
    _arm(REFERENCE, "not quantized: the reference of your own prompts", "bf16"),
    _arm(
        UNFUSED, "not quantized, without fusions: rounded where PyTorch modules round", "bf16", disable_passes=FUSIONS
    ),
    _arm(DEFAULT, "weights, activations, adapters and KV cache in int8, rotated, without a calibration", "int8"),
    _arm(AUTOMATIC, "the default on a GPU: int8 with the calibration of the first start", "int8", "automatic"),
    _arm(CALIBRATED, "int8 as `sidestream calibrate` writes it", "int8", "calibrated"),
    _arm(ROUNDED, "int8 as `sidestream calibrate --round` writes it", "int8", "calibrated rounded", rotate_values=True),
    _arm("fp8", "e4m3 with one scale per row, e4m3 KV cache, adapters in 16 bits", "fp8"),
    _arm(
        PEER_INT8,
        "W8A8 of other engines: int8 weights and activations, not rotated; the rest in 16 bits",
        "int8",
        rotate_activations=False,
        **PEER,
    ),
    _arm(PEER_FP8, "FP8 of other engines: e4m3 weights and activations; the rest in 16 bits", "fp8", **PEER),
)
BY_NAME = {arm.name: arm for arm in ARMS}
SMOKE = (DEFAULT, "fp8")


def chosen_arms(names: Sequence[str]) -> list[Arm]:
    """Return the arms with these names in the order of `ARMS`, or all of them.

    Raises ValueError for an unknown name.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--arms names {unknown[0]!r}, which is not an arm; arms: {', '.join(BY_NAME)}")
    return [arm for arm in ARMS if arm.name in names or not names]


def open_arm(
    arm: Arm, model: Any, adapters: Mapping[str, Any], calibration: Any = None, rounded: Any = None, **sizes: Any
) -> Any:
    """Return an `LLM` of this arm; its programs may be run directly after its last request.

    calibration, rounded  of the arms that need them; `rounded` is a file of weights
    """
    from ...runtime.llm import LLM

    own: dict[str, Any] = {}
    if not arm.automatic:
        own["calibration"] = calibration if arm.calibrated else "off"
        own["rounded_weights"] = rounded if arm.rounded else "off"
    llm = LLM(model, adapters, show_progress=False, enforce_eager=True, **{**arm.options, **own, **sizes})
    runner: Any = llm.engine.runner
    if llm.device.type == "cuda":  # few programs, captured when they are first used: the start takes seconds
        runner.buckets = replace(runner.buckets, rounded=True)
        runner.captures = True
    return llm
