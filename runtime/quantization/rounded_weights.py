"""File of weights that `sidestream calibrate --round` rounded.

The file is in safetensors format: eight-bit values and row scales of each linear; the metadata has one JSON object
about the checkpoint and the options (`Origin`).
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from ...compiler.graph.recipe import Recipe, rounded_from, rounded_name, rounded_parts
from ...compiler.options import CompileOptions, OptionError
from ...graphs.checkpoint import Checkpoint
from ...graphs.config import LlamaConfig
from ...graphs.files.safetensors_file import SafetensorsFile
from ...graphs.files.untrusted_files import FileRefusedError, open_regular
from .calibration import Calibration
from .defaults import OFF, file_name

KEY = "sidestream_rounding"
VERSION = 1
HOLDS_FOR = ("precision", "norm_rotation", "rotate_activations", "smooth_channels", "rotate_values")
ROUNDING_DECIDES = ("norm_rotation", "rotate_values")
"""Options that the file sets unless they are given."""
VALUES = {"int8": (torch.int8, "I8"), "fp8": (torch.float8_e4m3fn, "F8_E4M3")}
SAMPLED_ROWS = 4
_MAX_METADATA = 16 << 20
_MAX_EXTRA_BYTES = 32 << 20  # of a file besides its tensors


class RoundingError(OptionError):
    """The file of rounded weights is damaged, or belongs to another checkpoint or other options."""


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Origin of rounded weights.

    checkpoint   `checkpoint_digest` of the original weights
    calibration  `exponents_digest` of the channels' smoothing
    options      values of HOLDS_FOR
    recipes      weight -> its derivation from the checkpoint before rounding
    tokens       number of tokens of the text
    adapters     names of the adapters that also ran
    """

    version: int
    checkpoint: str
    calibration: str
    options: dict[str, Any]
    recipes: dict[str, str]
    tokens: int
    adapters: list[str]


_decode_origin = msgspec.json.Decoder(Origin).decode


def options_of(options: CompileOptions) -> dict[str, Any]:
    """Return the options that rounded weights depend on, as in JSON."""
    return json.loads(json.dumps({name: getattr(options, name) for name in HOLDS_FOR}))


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return a sha256 over names, shapes and some rows of all tensors; training or merging an adapter changes it."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint.names()):
        for _, tensor in checkpoint.parts(name):
            rows = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor  # experts are not rows
            rows = rows[:: max(1, math.ceil(len(rows) / SAMPLED_ROWS))] if rows.dim() else rows
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(rows.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def exponents_digest(calibration: Calibration | None, options: CompileOptions) -> str:
    """Return a sha256 over the exponents that smooth channels; "" without smoothing."""
    if calibration is None or not options.smooth_channels:
        return ""
    digest = hashlib.sha256()
    for name, exponents in sorted(calibration.channel_exponents.items()):
        digest.update(f"{name}\n".encode() + exponents.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Rounding:
    """An open file with a checked header; tensors are read on demand."""

    path: Path
    origin: Origin
    file: SafetensorsFile

    def before(self, lookup: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """Return a lookup of tensors by name in this file (as views), then in `lookup`."""

        def find(name: str) -> torch.Tensor:
            return self._tensor(name) if name in self.file.shapes else lookup(name)

        return find

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self.file.tensor(name)
        if tensor.dtype == torch.float32 and not bool(((tensor > 0) & tensor.isfinite()).all()):
            raise self._damaged(f"the scales {name} are not all above zero and finite")
        return tensor

    def check(self, recipes: Iterable[Recipe], shapes: Mapping[str, tuple[int, ...]], directory: Path | None) -> None:
        """Raise RoundingError unless the file has a tensor for each `rounded` recipe, with the recipe's source and the
        checkpoint's shape (`shapes`).
        """
        for part in (each for recipe in recipes for each in rounded_parts(recipe)):
            name, source = rounded_name(part), rounded_from(part)
            wanted, held = str(part.args[0]), self.origin.recipes.get(source)
            if held != wanted:
                raise RoundingError(
                    f"rounded weights {self.path} have {source} as {held or 'nothing'}, but these options need "
                    f"{wanted}: start with the options that they were written with, {_remedies(directory)}"
                )
            dtype = ("F32", VALUES[self.origin.options["precision"]][1])[part.attrs["index"] == 0]
            shape = shapes[source] if part.attrs["index"] == 0 else shapes[source][:1]
            found = self.file.shapes.get(name), self.file.dtypes.get(name)
            if found != (tuple(shape), dtype):
                raise self._damaged(f"{name} is {found[1]} {found[0]}, not {dtype} {tuple(shape)}")

    def _damaged(self, problem: str) -> RoundingError:
        return _unreadable(self.path, problem)


def _remedies(directory: Path | None) -> str:
    return (
        f"write them again with `sidestream calibrate {directory} --round`, or leave them out with rounded_weights="
        f"{OFF!r}"
    )


def _unreadable(path: Path, problem: object) -> RoundingError:
    return RoundingError(
        f"rounded weights {path} cannot be read ({problem}); write them again with `sidestream calibrate --round`, or "
        f"leave them out with rounded_weights={OFF!r}"
    )


def open_rounding(path: str | Path) -> Rounding:
    """Open a file of `write_rounding` and check its header. Raises RoundingError for any other file."""
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as opened_file:
            size = os.fstat(opened_file.fileno()).st_size
        file = SafetensorsFile(path, RoundingError, "write it again with `sidestream calibrate --round`")
        with safe_open(str(path), framework="pt") as opened:
            text = (opened.metadata() or {}).get(KEY, "")
        if not text or len(text) > _MAX_METADATA or size > _tensor_bytes(file) + _MAX_EXTRA_BYTES:
            raise ValueError("it has no valid description")
        origin = _decode_origin(text)
        if origin.version != VERSION:
            raise ValueError(f"it has version {origin.version}, this release reads {VERSION}")
        if not set(origin.options) >= set(HOLDS_FOR) or origin.options["precision"] not in VALUES:
            raise ValueError("its description has no options")
    except FileNotFoundError:
        raise RoundingError(
            f"rounded weights {path} does not exist; `sidestream calibrate MODEL --round` writes one"
        ) from None
    except RoundingError:
        raise
    except (OSError, FileRefusedError, SafetensorError, ValueError, RecursionError) as problem:
        raise _unreadable(path, problem) from None
    return Rounding(path, origin, file)


def _tensor_bytes(file: SafetensorsFile) -> int:
    return sum(math.prod(shape) * (4 if file.dtypes[name] == "F32" else 1) for name, shape in file.shapes.items())


def find_rounding(
    given: Any,
    config: LlamaConfig,
    directory: Path | None,
    options: CompileOptions,
    calibration: Calibration | None,
    as_rounded: Collection[str] = (),
) -> tuple[Rounding | None, CompileOptions]:
    """Return the rounded weights, and the options with the values that they set.

    They are read from the `given` file, else from the file for this precision in the checkpoint's directory. They are
    None without a file, for "off", without quantization, and for a checkpoint that stores eight-bit weights.

    `as_rounded`: options that the file sets. Raises RoundingError for a file that is damaged or belongs to another
    checkpoint or other options.
    """
    if given is not None and not isinstance(given, (str, Path)):
        raise RoundingError(f"rounded_weights={given!r} must be the path of a file, or {OFF!r}")
    named = given is not None
    if given == OFF or not options.quantizes:
        return None, options
    if directory is None or config.weight_format:
        if named:
            which = "random weights" if directory is None else "a checkpoint of eight-bit weights"
            raise RoundingError(f"rounded_weights={str(given)!r} cannot be used with {which}; leave it out")
        return None, options
    path = directory / file_name(options.precision) if given is None else Path(given)
    if not named and not path.exists():
        return None, options
    found = open_rounding(path)
    if as_rounded and found.origin.options["precision"] == options.precision:
        options = _as_rounded(options, found, as_rounded)
    _check_options(found, options, directory)
    if found.origin.checkpoint != checkpoint_digest(Checkpoint(directory, config)):
        raise RoundingError(
            f"rounded weights {path} are of another checkpoint: its weights differ from those in {directory}; "
            f"{_remedies(directory)}"
        )
    if found.origin.calibration != exponents_digest(calibration, options):
        raise RoundingError(
            f"rounded weights {path} need another calibration: give the calibration that was written with them, "
            f"{_remedies(directory)}"
        )
    return found, replace(options, rounded_weights=True)


def _as_rounded(options: CompileOptions, found: Rounding, names: Collection[str]) -> CompileOptions:
    held = {name: found.origin.options[name] for name in names}
    layers = {name: tuple(value) for name, value in held.items() if isinstance(value, list)}  # JSON has no tuples
    try:
        return replace(options, **held | layers)
    except OptionError as problem:
        raise _unreadable(found.path, problem) from None


def _check_options(found: Rounding, options: CompileOptions, directory: Path) -> None:
    ours, theirs = options_of(options), found.origin.options
    differing = [name for name in HOLDS_FOR if ours[name] != theirs[name]]
    if differing:
        held = ", ".join(f"{name}={theirs[name]!r}" for name in differing)
        asked = ", ".join(f"{name}={ours[name]!r}" for name in differing)
        raise RoundingError(
            f"rounded weights {found.path} were made with {held}, but these options have {asked}: start with {held}, "
            f"{_remedies(directory)}"
        )


def write_rounding(
    path: Path,
    origin: Origin,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write the file atomically, one tensor at a time, in the order of `shapes` (name -> shape and dtype).

    Raises OSError.
    """
    spelled = {torch.float32: "F32", **dict(VALUES.values())}
    header: dict[str, Any] = {"__metadata__": {KEY: msgspec.json.encode(origin).decode()}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        first, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": spelled[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}_", delete=False) as file:
        try:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in tensors:
                if (tuple(tensor.shape), tensor.dtype) != shapes[name]:
                    raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but {shapes[name]} was declared")
                file.write(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
