"""Weights as `sidestream calibrate --round` has rounded them, as a file next to the checkpoint.

It is one safetensors file: for each linear's weight the eight-bit values and a scale for each row, and in the metadata
one JSON object with the checkpoint that they are of and the options that they hold for.
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
from ...graphs.regular_file import FileRefusedError, open_regular
from ...graphs.safetensors_file import SafetensorsFile
from .calibration import Calibration
from .file_names import OFF, file_name

KEY = "sidestream_rounding"
VERSION = 1
HOLDS_FOR = ("precision", "norm_rotation", "rotate_activations", "smooth_channels", "rotate_values")
ROUNDING_DECIDES = ("norm_rotation", "rotate_values")
"""Options that are those of the file where they are not given."""
VALUES = {"int8": (torch.int8, "I8"), "fp8": (torch.float8_e4m3fn, "F8_E4M3")}
SAMPLED_ROWS = 4
_MAX_METADATA = 16 << 20
_MAX_EXTRA_BYTES = 32 << 20  # of a file beyond its tensors: the header


class RoundingError(OptionError):
    """Rounded weights that cannot be used: the file is damaged, of another checkpoint, or holds for other options."""


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says of itself.

    checkpoint   which weights were rounded (`checkpoint_digest`)
    calibration  which powers of two smooth its channels (`exponents_digest`)
    options      those of HOLDS_FOR
    recipes      weight -> how it was made of the checkpoint before it was rounded
    tokens       of text that the inputs were taken from
    adapters     names of the adapters that read it too, next to the base
    """

    version: int
    checkpoint: str
    calibration: str
    options: dict[str, Any]
    recipes: dict[str, str]
    tokens: int
    adapters: list[str]


def options_of(options: CompileOptions) -> dict[str, Any]:
    """The options that rounded weights hold for, as JSON has them."""
    return json.loads(json.dumps({name: getattr(options, name) for name in HOLDS_FOR}))


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Which weights they are, without reading them all: a sha256 over the names and shapes of all tensors and some rows
    of each, which a merged adapter or any training changes.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint.names()):
        tensor = checkpoint.tensor(name)
        rows = tensor[:: max(1, math.ceil(len(tensor) / SAMPLED_ROWS))] if tensor.dim() else tensor
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(rows.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def exponents_digest(calibration: Calibration | None, options: CompileOptions) -> str:
    """Which powers of two smooth the channels: their sha256; "" where none do."""
    if calibration is None or not options.smooth_channels:
        return ""
    digest = hashlib.sha256()
    for name, exponents in sorted(calibration.channel_exponents.items()):
        digest.update(f"{name}\n".encode() + exponents.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Rounding:
    """An open file: its header is read and checked, its tensors are read when they are asked for."""

    path: Path
    origin: Origin
    file: SafetensorsFile

    def before(self, lookup: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """`lookup`, and before it this file's tensors, views of it."""

        def find(name: str) -> torch.Tensor:
            return self._tensor(name) if name in self.file.shapes else lookup(name)

        return find

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self.file.tensor(name)
        if tensor.dtype == torch.float32 and not bool(((tensor > 0) & tensor.isfinite()).all()):
            raise self._damaged(f"the scales {name} are not all above zero and finite")
        return tensor

    def check(self, recipes: Iterable[Recipe], shapes: Mapping[str, tuple[int, ...]], directory: Path | None) -> None:
        """Raises RoundingError unless each `rounded` recipe has its tensor here: rounded from what the recipe says, and
        of the checkpoint's shape (`shapes`).
        """
        for part in (each for recipe in recipes for each in rounded_parts(recipe)):
            name, source = rounded_name(part), rounded_from(part)
            wanted, held = str(part.args[0]), self.origin.recipes.get(source)
            if held != wanted:
                raise RoundingError(
                    f"rounded weights {self.path} hold {source} as {held or 'nothing'}, and with these options it is "
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
    """The file at `path`, its header checked. Raises RoundingError for any other than `write_rounding` wrote."""
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as opened_file:
            size = os.fstat(opened_file.fileno()).st_size
        file = SafetensorsFile(path, RoundingError, "write it again with `sidestream calibrate --round`")
        with safe_open(str(path), framework="pt") as opened:
            text = (opened.metadata() or {}).get(KEY, "")
        if not text or len(text) > _MAX_METADATA or size > _tensor_bytes(file) + _MAX_EXTRA_BYTES:
            raise ValueError("it does not say what it holds")
        origin = msgspec.json.decode(text, type=Origin)
        if origin.version != VERSION:
            raise ValueError(f"it has version {origin.version}, this release reads {VERSION}")
        if not set(origin.options) >= set(HOLDS_FOR) or origin.options["precision"] not in VALUES:
            raise ValueError("it does not say which options it holds for")
    except FileNotFoundError:
        raise RoundingError(
            f"rounded weights {path}: there is no such file; `sidestream calibrate MODEL --round` writes one"
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
    """The rounded weights in use and the options with them: the file that was `given`, else the one for this precision
    next to the checkpoint; None where there is none, where nothing is quantized, for "off", and for weights that are
    stored in eight bits already.

    `as_rounded`: the options that the file decides. Raises RoundingError for a file that is damaged, of another
    checkpoint, or holds for other options.
    """
    if given is not None and not isinstance(given, (str, Path)):
        raise RoundingError(f"rounded_weights={given!r} must be the path of a file, or {OFF!r}")
    named = given is not None
    if given == OFF or not options.quantizes:
        return None, options
    if directory is None or config.weight_format:
        if named:
            which = "random weights" if directory is None else "weights that the checkpoint stores in eight bits"
            raise RoundingError(f"rounded_weights={str(given)!r} can't be of {which}; leave it out")
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
            f"rounded weights {path} hold for channels that another calibration has smoothed: give the calibration "
            f"that was written with them, {_remedies(directory)}"
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
            f"rounded weights {found.path} hold for {held}, and these options have {asked}: start with {held}, "
            f"{_remedies(directory)}"
        )


def write_rounding(
    path: Path,
    origin: Origin,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write the file, its tensors one at a time as they come, in the order of `shapes` (name -> shape and dtype): none
    is kept. Readers see the former file or the whole new one.

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
                    raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not as announced")
                file.write(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
