"""What `sidestream calibrate` has measured of a model's keys, values and norms, as a file, and what it decides: the KV
cache's dtype, by layer how K is treated, and how channels after norms and in MLPs are smoothed.

A calibration is one safetensors file: each layer's mean key and each norm's exponents as tensors, and in the metadata
one JSON object with the figures and the model that they are of.
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
from ...graphs.regular_file import open_regular
from .file_names import AUTO, FILE_NAME, OFF

KEY = "sidestream_calibration"
VERSION = 1
KV_DTYPES = ("int8", "fp8_e4m3")
# How K is treated: (Hadamard, centring), the ones that cost least first.
TREATMENTS = ((True, False), (True, True), (False, False), (False, True))
WORTH = 0.95  # another treatment than the first must bring the error below this share of it
# and another cache dtype than the precision's own, which is what whole answers were measured with, below this share of
# its error
WORTH_DTYPE = 0.8
MOST_EXPONENT = 8
_MAX_METADATA = 16 << 20
_FINGERPRINT_ROWS = 4


class CalibrationError(OptionError):
    """A calibration that cannot be used: it is damaged, or of another model."""


@dataclass(frozen=True)
class LayerFigures:
    """One layer. Errors are simulated with the layer's own queries: see `runtime.quantization.kv_error`.

    key_errors    (kv dtype, Hadamard, centring) -> error of the attention scores, in nats
    value_errors  (kv dtype, rotated) -> relative error of attention's output
    key_amax, value_amax          largest magnitude
    key_outliers, value_outliers  mean over tokens of amax / rms of a head: 1 is flat, sqrt(head dim) is one channel
                                  alone
    bias          share of the keys' mean square that their mean holds
    """

    key_errors: Mapping[tuple[str, bool, bool], float]
    value_errors: Mapping[tuple[str, bool], float]
    key_amax: float = 0.0
    value_amax: float = 0.0
    key_outliers: float = 0.0
    value_outliers: float = 0.0
    bias: float = 0.0

    def treatment(self, kv_dtype: str) -> tuple[bool, bool]:
        """(Hadamard, centring) with the least error; one that costs more must earn it."""
        first = TREATMENTS[0]
        best = min(TREATMENTS, key=lambda each: self.key_errors[(kv_dtype, *each)])
        return best if self.key_errors[(kv_dtype, *best)] < WORTH * self.key_errors[(kv_dtype, *first)] else first

    def error(self, kv_dtype: str) -> float:
        """Error of the layer's attention with its best treatment: scores and values together."""
        keys = self.key_errors[(kv_dtype, *self.treatment(kv_dtype))]
        return (keys**2 + self.value_errors[(kv_dtype, False)] ** 2) ** 0.5


@dataclass(frozen=True)
class Calibration:
    """A model's figures: they serve int8 and fp8 mode alike, and each mode takes from them what it needs.

    fingerprint   which model it is of (`fingerprint`)
    key_centers   by layer, the mean key [kv heads, head dim] fp32, after RoPE, before any Hadamard transform
    tokens        how many tokens were looked at
    adapters      names of the adapters that ran, next to the base
    channel_exponents  by name (`channel_exponents_name`) what each channel after a norm, or that an MLP's down_proj
                  reads, is divided by, as powers of two: int8 [hidden size] or [intermediate size]. Files of earlier
                  releases have none, or none of down_proj's
    """

    fingerprint: str
    layers: Sequence[LayerFigures]
    key_centers: Sequence[torch.Tensor]
    tokens: int = 0
    adapters: tuple[str, ...] = field(default=())
    channel_exponents: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def error(self, kv_dtype: str) -> float:
        """Root mean square over the layers."""
        return (sum(layer.error(kv_dtype) ** 2 for layer in self.layers) / len(self.layers)) ** 0.5

    def kv_dtype(self, precision: str) -> str:
        """The cache dtype for `precision` ("int8" or "fp8"): its own, unless the other one's error is far smaller."""
        first = DEFAULT_KV_DTYPE[precision]
        (other,) = set(KV_DTYPES) - {first}
        return other if self.error(other) < WORTH_DTYPE * self.error(first) else first

    def value_error(self, kv_dtype: str, rotated: bool) -> float:
        """Relative error of attention's output by the values alone, root mean square over the layers."""
        return (sum(layer.value_errors[kv_dtype, rotated] ** 2 for layer in self.layers) / len(self.layers)) ** 0.5

    def options(
        self,
        options: CompileOptions,
        hadamard: bool = True,
        center_keys: bool = True,
        smooth_channels: bool = True,
    ) -> CompileOptions:
        """`options` with a dtype where it says "auto", and with Hadamard, centring and smoothing where these are left
        to the calibration.
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
        """The constants under the names that recipes look for."""
        centers = {key_center_name(layer): center for layer, center in enumerate(self.key_centers)}
        return {**centers, **self.channel_exponents}

    def save(self, path: str | Path) -> None:
        """Write the file."""
        figures = [
            {
                "key_errors": [[*treatment, error] for treatment, error in layer.key_errors.items()],
                "value_errors": [[*treatment, error] for treatment, error in layer.value_errors.items()],
            }
            | {name: getattr(layer, name) for name in _PLAIN}
            for layer in self.layers
        ]
        content = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "tokens": self.tokens,
            "adapters": list(self.adapters),
            "layers": figures,
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        Path(path).write_bytes(save(tensors, metadata={KEY: json.dumps(content, allow_nan=False)}))


_PLAIN = ("key_amax", "value_amax", "key_outliers", "value_outliers", "bias")


def load_calibration(path: str | Path) -> Calibration:
    """The calibration that `save` wrote. Raises CalibrationError for any other file."""
    path = Path(path)
    try:
        os.close(open_regular(path))  # safe_open would wait for a pipe's other end
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(KEY, "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        if not text or len(text) > _MAX_METADATA:
            raise ValueError("it holds no figures")
        return _parse(json.loads(text), tensors)
    except FileNotFoundError:
        raise CalibrationError(
            f"calibration {path}: there is no such file; `sidestream calibrate MODEL -o FILE` writes one"
        ) from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CalibrationError(
            f"calibration {path} cannot be read ({problem}); write it again with `sidestream calibrate`"
        ) from None


def _parse(content: Any, tensors: Mapping[str, torch.Tensor]) -> Calibration:
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r}, this release reads {VERSION}")
    layers = [_figures(entry) for entry in content["layers"]]
    centers = [tensors[key_center_name(layer)] for layer in range(len(layers))]
    if not layers or any(
        center.dtype != torch.float32 or center.dim() != 2 or not bool(center.isfinite().all()) for center in centers
    ):
        raise ValueError("its key centers are not finite fp32 matrices")
    exponents = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{SUFFIX}")}
    for name, tensor in exponents.items():
        if tensor.dtype != torch.int8 or tensor.dim() != 1 or bool((tensor.abs() > MOST_EXPONENT).any()):
            raise ValueError(f"{name} does not hold whole numbers of at most {MOST_EXPONENT}")
    names = tuple(map(str, content["adapters"]))
    return Calibration(str(content["fingerprint"]), layers, centers, int(content["tokens"]), names, exponents)


def _figures(entry: Any) -> LayerFigures:
    keys = {
        (str(dtype), bool(hadamard), bool(center)): _figure(error)
        for dtype, hadamard, center, error in entry["key_errors"]
    }
    values = {(str(dtype), bool(rotated)): _figure(error) for dtype, rotated, error in entry["value_errors"]}
    missing = {(dtype, *each) for dtype in KV_DTYPES for each in TREATMENTS} - set(keys)
    if missing or {(dtype, rotated) for dtype in KV_DTYPES for rotated in (False, True)} - set(values):
        raise ValueError("a layer's figures are not complete")
    return LayerFigures(keys, values, **{name: _figure(entry[name]) for name in _PLAIN})


def _figure(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no error figure")
    return float(value)


def fingerprint(config: LlamaConfig, checkpoint: Checkpoint) -> str:
    """Which model it is, without reading it all: a sha256 over the shape, RoPE and the first rows of every layer's
    k_proj and v_proj.
    """
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
    """The calibration that was given, for "auto" and None the one next to the checkpoint, else None, as for "off";
    `directory` None: the weights are random, nothing is looked for.

    Raises CalibrationError for a file that cannot be read or is of another model.
    """
    path: Any = "given as a value"
    if not isinstance(given, Calibration):
        found = given in (None, AUTO)
        if given == OFF or (found and (directory is None or not (directory / FILE_NAME).is_file())):
            return None
        path = Path(str(directory)) / FILE_NAME if found else given
        given = load_calibration(path)
    if directory is None:
        raise CalibrationError(f"calibration {path} can't be of random weights; leave it out with load_format='dummy'")
    shapes = {tuple(center.shape) for center in given.key_centers}
    wanted = (config.num_key_value_heads, config.head_dim)
    again = f"write one for this model: sidestream calibrate {directory} -o FILE"
    if len(given.layers) != config.num_hidden_layers or shapes != {wanted}:
        theirs = (
            f"{len(given.layers)} layers of {' or '.join(f'{heads} x {width}' for heads, width in sorted(shapes))} keys"
        )
        ours = f"{config.num_hidden_layers} of {wanted[0]} x {wanted[1]}"
        raise CalibrationError(f"calibration {path} is of another model: it has {theirs}, this one {ours}; {again}")
    for name, exponents in given.channel_exponents.items():
        width = config.intermediate_size if name.endswith(f".down_proj.{SUFFIX}") else config.hidden_size
        if len(exponents) != width:
            raise CalibrationError(
                f"calibration {path} is of another model: {name} has {len(exponents)} channels, and this model {width} "
                f"there; {again}"
            )
    if given.fingerprint != fingerprint(config, Checkpoint(directory, config)):
        raise CalibrationError(
            f"calibration {path} is of another model of the same shape: its weights differ from those in "
            f"{directory}; {again}"
        )
    return _completed(given, config)


def _completed(given: Calibration, config: LlamaConfig) -> Calibration:
    """With zeros for MLPs that were not looked at, as in files of earlier releases: these stay as they are."""
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
    """The calibration in use (see `find_calibration`; None where nothing is quantized) and the options with what it
    decides (see `Calibration.options`).

    Raises OptionError for keys that are to be centred when nothing was calibrated.
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
