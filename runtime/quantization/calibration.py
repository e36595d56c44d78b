"""Results of `sidestream calibrate` as a file, and the options that they set: dtype of the KV cache, treatment of K by
layer, and smoothing of channels.

The file is in safetensors format: mean keys and exponents of channels are tensors; the metadata has one JSON object
with the statistics and the model's fingerprint.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...compiler.options import DEFAULT_KV_DTYPE, CompileOptions, OptionError
from ...compiler.passes.quantize.center_keys import key_center_name
from ...compiler.passes.quantize.smooth_channels import SUFFIX
from ...graphs.checkpoint import Checkpoint
from ...graphs.config import LlamaConfig
from ...graphs.files.untrusted_files import open_regular
from .defaults import AUTO, FILE_NAME, OFF

KEY = "sidestream_calibration"
VERSION = 1
KV_DTYPES = ("int8", "fp8_e4m3")
# Treatments of K: (Hadamard, centring), cheapest first.
TREATMENTS = ((True, False), (True, True), (False, False), (False, True))
MAX_TREATMENT_ERROR = 0.95  # a treatment other than the first must have an error below this share of the first one's
MAX_DTYPE_ERROR = 0.8  # the same for a cache dtype other than the precision's own, which the evaluations used
MAX_EXPONENT = 8
_MAX_METADATA = 16 << 20
_FINGERPRINT_ROWS = 4


class CalibrationError(OptionError):
    """A calibration is damaged or belongs to another model."""


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer. Errors are simulated, see `runtime.quantization.kv_error`.

    key_errors    (kv dtype, Hadamard, centring) -> error of the attention scores, in nats
    value_errors  (kv dtype, rotated) -> relative error of attention's output
    key_amax, value_amax          largest magnitude
    key_outliers, value_outliers  mean over tokens of amax / rms of a head, from 1 to sqrt(head dim)
    bias          share of the mean key in the keys' mean square
    """

    key_errors: Mapping[tuple[str, bool, bool], float]
    value_errors: Mapping[tuple[str, bool], float]
    key_amax: float = 0.0
    value_amax: float = 0.0
    key_outliers: float = 0.0
    value_outliers: float = 0.0
    bias: float = 0.0

    def treatment(self, kv_dtype: str) -> tuple[bool, bool]:
        """Return the (Hadamard, centring) with the smallest error, or the cheapest unless another is clearly better."""
        errors = {each: self.key_errors[(kv_dtype, *each)] for each in TREATMENTS}
        first, best = TREATMENTS[0], min(errors, key=errors.__getitem__)
        return best if errors[best] < MAX_TREATMENT_ERROR * errors[first] else first

    def error(self, kv_dtype: str) -> float:
        """Return the error of attention with the best treatment, from scores and values together."""
        keys = self.key_errors[(kv_dtype, *self.treatment(kv_dtype))]
        return (keys**2 + self.value_errors[(kv_dtype, False)] ** 2) ** 0.5


@dataclass(frozen=True)
class Calibration:
    """Calibration of a model, for int8 and fp8 alike.

    fingerprint   of the model (`fingerprint`)
    key_centers   by layer, the mean key [kv heads, head dim] fp32, after RoPE, before any Hadamard transform
    tokens        number of calibration tokens
    adapters      names of the adapters that also ran
    channel_exponents  name (`channel_exponents_name`) -> exponents of two by which channels after a norm or before
                  down_proj are divided, int8 [hidden size] or [intermediate size]. Files of earlier releases have none,
                  or none for down_proj
    """

    fingerprint: str
    layers: Sequence[LayerStatistics]
    key_centers: Sequence[torch.Tensor]
    tokens: int = 0
    adapters: tuple[str, ...] = field(default=())
    channel_exponents: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def error(self, kv_dtype: str) -> float:
        """Return the root mean square of the layers' errors."""
        return (sum(layer.error(kv_dtype) ** 2 for layer in self.layers) / len(self.layers)) ** 0.5

    def kv_dtype(self, precision: str) -> str:
        """Return the cache dtype for "int8" or "fp8": the precision's own, unless the other has a far smaller error."""
        first = DEFAULT_KV_DTYPE[precision]
        (other,) = set(KV_DTYPES) - {first}
        return other if self.error(other) < MAX_DTYPE_ERROR * self.error(first) else first

    def value_error(self, kv_dtype: str, rotated: bool) -> float:
        """Return the relative error of attention's output from values alone, root mean square over the layers."""
        return (sum(layer.value_errors[kv_dtype, rotated] ** 2 for layer in self.layers) / len(self.layers)) ** 0.5

    def options(
        self,
        options: CompileOptions,
        hadamard: bool = True,
        center_keys: bool = True,
        smooth_channels: bool = True,
    ) -> CompileOptions:
        """Return `options` with the calibrated dtype for "auto", and with the calibrated Hadamard, centring and
        smoothing where the flags are true.
        """
        if smooth_channels and options.precision == "int8":
            options = replace(options, smooth_channels=bool(self.channel_exponents))
        if not options.quantizes_kv:
            return options
        kv_dtype: Any = self.kv_dtype(options.precision) if options.kv_dtype == "auto" else options.kv_dtype
        chosen = [layer.treatment(kv_dtype) for layer in self.layers]
        changes: dict[str, Any] = {"kv_dtype": kv_dtype}
        for place, (name, wanted) in enumerate((("hadamard", hadamard), ("center_keys", center_keys))):
            layers = tuple(layer for layer, treatment in enumerate(chosen) if treatment[place])
            if wanted:
                changes[name] = len(layers) == len(chosen) if len(layers) in (0, len(chosen)) else layers
        return replace(options, **changes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors under their names in recipes."""
        centers = {key_center_name(layer): center for layer, center in enumerate(self.key_centers)}
        return {**centers, **self.channel_exponents}

    def save(self, path: str | Path) -> None:
        """Write the file."""
        layers = [
            {
                "key_errors": [[*treatment, error] for treatment, error in layer.key_errors.items()],
                "value_errors": [[*treatment, error] for treatment, error in layer.value_errors.items()],
            }
            | {name: getattr(layer, name) for name in _SCALARS}
            for layer in self.layers
        ]
        content = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "tokens": self.tokens,
            "adapters": list(self.adapters),
            "layers": layers,
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        Path(path).write_bytes(save(tensors, metadata={KEY: json.dumps(content, allow_nan=False)}))


_SCALARS = ("key_amax", "value_amax", "key_outliers", "value_outliers", "bias")


def load_calibration(path: str | Path) -> Calibration:
    """Return the calibration in a file of `save`. Raises CalibrationError for any other file."""
    path = Path(path)
    try:
        os.close(open_regular(path))  # safe_open would block on a pipe
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(KEY, "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        if not text or len(text) > _MAX_METADATA:
            raise ValueError("it is not a calibration")
        return _parse(json.loads(text), tensors)
    except FileNotFoundError:
        raise CalibrationError(
            f"calibration {path} does not exist; `sidestream calibrate MODEL -o FILE` writes one"
        ) from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CalibrationError(
            f"calibration {path} cannot be read ({problem}); write it again with `sidestream calibrate`"
        ) from None


def _parse(content: Any, tensors: Mapping[str, torch.Tensor]) -> Calibration:
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r}, this release reads {VERSION}")
    layers = [_statistics(entry) for entry in content["layers"]]
    centers = [tensors[key_center_name(layer)] for layer in range(len(layers))]
    if not layers or any(
        center.dtype != torch.float32 or center.dim() != 2 or not bool(center.isfinite().all()) for center in centers
    ):
        raise ValueError("its key centers are not finite fp32 matrices")
    exponents = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{SUFFIX}")}
    for name, tensor in exponents.items():
        if tensor.dtype != torch.int8 or tensor.dim() != 1 or bool((tensor.abs() > MAX_EXPONENT).any()):
            raise ValueError(f"{name} does not hold integers of at most {MAX_EXPONENT}")
    names = tuple(map(str, content["adapters"]))
    return Calibration(str(content["fingerprint"]), layers, centers, int(content["tokens"]), names, exponents)


def _statistics(entry: Any) -> LayerStatistics:
    keys = {
        (str(dtype), bool(hadamard), bool(center)): _error(error)
        for dtype, hadamard, center, error in entry["key_errors"]
    }
    values = {(str(dtype), bool(rotated)): _error(error) for dtype, rotated, error in entry["value_errors"]}
    missing = {(dtype, *each) for dtype in KV_DTYPES for each in TREATMENTS} - set(keys)
    if missing or {(dtype, rotated) for dtype in KV_DTYPES for rotated in (False, True)} - set(values):
        raise ValueError("the statistics of a layer are not complete")
    return LayerStatistics(keys, values, **{name: _error(entry[name]) for name in _SCALARS})


def _error(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
        raise ValueError(f"{value!r} is not a valid error")
    return float(value)


def fingerprint(config: LlamaConfig, checkpoint: Checkpoint) -> str:
    """Return a sha256 over the model's shape, RoPE and the first rows of each layer's k_proj and v_proj."""
    digest = hashlib.sha256(json.dumps(_shape(config), sort_keys=True, default=str).encode())
    for layer in range(config.num_hidden_layers):
        for name in ("k_proj", "v_proj"):
            rows = checkpoint.tensor(f"model.layers.{layer}.self_attn.{name}.weight")[:_FINGERPRINT_ROWS]
            digest.update(rows.to(torch.float32).numpy().tobytes())
    return digest.hexdigest()


def _shape(config: LlamaConfig) -> dict[str, Any]:
    names = (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "rope_theta",
        "rope_scaling",
    )
    return {name: getattr(config, name, None) for name in names}


def find_calibration(
    given: "str | Path | Calibration | None", config: LlamaConfig, directory: Path | None
) -> Calibration | None:
    """Return the given calibration. For "auto" and None, return that of the checkpoint's directory, if any.

    Returns None for "off". `directory` is None for random weights.

    Raises CalibrationError for a file that cannot be read or belongs to another model.
    """
    path: Any = "given as a value"
    if not isinstance(given, Calibration):
        found = given in (None, AUTO)
        if given == OFF or (found and (directory is None or not (directory / FILE_NAME).is_file())):
            return None
        path = Path(str(directory)) / FILE_NAME if found else given
        given = load_calibration(path)
    if directory is None:
        raise CalibrationError(
            f"calibration {path} cannot be used with random weights; leave it out with load_format='dummy'"
        )
    shapes = {tuple(center.shape) for center in given.key_centers}
    wanted = (config.num_key_value_heads, config.head_dim)
    again = f"write one for this model: sidestream calibrate {directory} -o FILE"
    if len(given.layers) != config.num_hidden_layers or shapes != {wanted}:
        keys = " or ".join(f"{heads} x {width}" for heads, width in sorted(shapes))
        raise CalibrationError(
            f"calibration {path} is of another model: it has {len(given.layers)} layers of {keys} keys, this model "
            f"{config.num_hidden_layers} of {wanted[0]} x {wanted[1]}; {again}"
        )
    for name, exponents in given.channel_exponents.items():
        width = config.intermediate_size if name.endswith(f".down_proj.{SUFFIX}") else config.hidden_size
        if len(exponents) != width:
            raise CalibrationError(
                f"calibration {path} is of another model: {name} has {len(exponents)} channels, this model "
                f"{width}; {again}"
            )
    if given.fingerprint != fingerprint(config, Checkpoint(directory, config)):
        raise CalibrationError(
            f"calibration {path} is of another model of the same shape: its weights differ from those in "
            f"{directory}; {again}"
        )
    return _completed(given, config)


def _completed(given: Calibration, config: LlamaConfig) -> Calibration:
    """Add zeros (no smoothing) for the MLPs, which files of earlier releases do not have."""
    if not given.channel_exponents:
        return given
    names = [f"model.layers.{layer}.mlp.down_proj.{SUFFIX}" for layer in range(config.num_hidden_layers)]
    unknown = {name: torch.zeros(config.intermediate_size, dtype=torch.int8) for name in names}
    return replace(given, channel_exponents={**unknown, **given.channel_exponents})


def calibrated(
    given: "str | Path | Calibration | None",
    config: LlamaConfig,
    directory: Path | None,
    options: CompileOptions,
    hadamard: bool,
    center_keys: bool,
    smooth_channels: bool,
) -> tuple[Calibration | None, CompileOptions]:
    """Return the calibration (see `find_calibration`; None if nothing is quantized), and the options with it (see
    `Calibration.options`).

    Raises OptionError for options that need a calibration without one.
    """
    found = find_calibration(given, config, directory) if options.quantizes else None
    if options.smooth_channels and not getattr(found, "channel_exponents", None):
        raise OptionError(
            "smooth_channels=True needs a calibration that measured the norms: write one with `sidestream calibrate`, "
            "and give calibration=FILE"
        )
    if found is not None:
        return found, found.options(options, hadamard, center_keys, smooth_channels)
    if options.center_keys:
        raise OptionError(
            f"center_keys={options.center_keys} needs the keys' means: write them with `sidestream calibrate`, and "
            "give calibration=FILE"
        )
    return None, options
