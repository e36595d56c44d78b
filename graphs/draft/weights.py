"""The .safetensors file of an EAGLE-3 head; its header is checked against the config before tensors are read."""

import math
import os
from pathlib import Path

import numpy as np
import torch

from ..checkpoint import SINGLE, CheckpointError
from ..files.safetensors_file import FLOATING, LARGEST, in_range, read_fully
from ..files.safetensors_header import Layout, damaged, open_file, read_layout
from ..files.untrusted_files import name_of
from .config import EagleConfig
from .eagle import EMBEDDING, MAPPING, EagleDraft

_AGAIN = "download or save the draft again"
_NO_HEAD = "the draft is not a plain EAGLE-3 head; use a plain one"
_IGNORED = ("t2d", EMBEDDING)
"""Tensors of published heads that are not read: `t2d` is the inverse of `d2t`, the embedding is the target's."""
_MOST_TENSORS = 64
_MAPPING_DTYPES = {"I64": torch.int64, "I32": torch.int32}


def read_eagle_tensors(directory: str | Path, config: EagleConfig) -> dict[str, torch.Tensor]:
    """Return the head's tensors by name: those of `EagleDraft.checkpoint_tensors` as stored, and `d2t`.

    `d2t` [draft vocabulary] int64 is the offset from a drafted id to the target's id. Raises CheckpointError for
    irregular files, pickles, unexpected names and shapes, NaN, infinity and magnitudes of at least LARGEST, and a `d2t`
    outside of the vocabulary.
    """
    path = Path(directory) / SINGLE
    _refuse_pickles(path)
    layout = read_layout(path, CheckpointError, _AGAIN, _MOST_TENSORS, foreign=_NO_HEAD)
    expected = EagleDraft(config, device="meta").checkpoint_tensors()
    _check_layout(layout, expected, config)
    tensors = _read(path, layout, [name for name in (*expected, MAPPING) if name in layout.places])
    for name in expected:
        if not in_range(tensors[name].view(torch.uint8).flatten().numpy(), tensors[name].dtype):
            raise CheckpointError(
                f"{SINGLE}: tensor {name!r} has NaN, infinity or magnitudes of {LARGEST} or more: use an earlier "
                "checkpoint of the draft"
            )
    tensors[MAPPING] = _mapping(tensors.get(MAPPING), config)
    return tensors


def _refuse_pickles(path: Path) -> None:
    """Raise CheckpointError if the directory has pickled weights and no `path`."""
    if path.exists() or not path.parent.is_dir():
        return
    for name in ("pytorch_model.bin", "model.bin", "model.pt"):
        if (path.parent / name).exists():
            raise CheckpointError(
                f"{name} is a pickle, which can run code and is never loaded: convert it where you trust it, with "
                f"safetensors.torch.save_file(torch.load({name!r}, weights_only=True), {SINGLE!r})"
            )


def _check_layout(layout: Layout, expected: dict[str, tuple[int, ...]], config: EagleConfig) -> None:
    """Check names, shapes and dtypes of the header."""
    for name, shape in expected.items():
        if name not in layout.places:
            raise CheckpointError(f"{SINGLE}: the draft has no tensor {name!r}: it is not an EAGLE-3 head; {_AGAIN}")
        place = layout.places[name]
        if place.shape != shape:
            raise CheckpointError(
                f"{SINGLE}: tensor {name!r} has shape {list(place.shape)}, the draft's config.json implies "
                f"{list(shape)}: use the config.json of these weights"
            )
        if place.dtype not in FLOATING:
            raise CheckpointError(f"{SINGLE}: tensor {name!r} is not in {', '.join(FLOATING)}: save it unquantized")
    for name in layout.places:
        if name not in expected and name != MAPPING and name not in _IGNORED:
            raise CheckpointError(f"{SINGLE}: unexpected tensor {name_of(name)}: {_NO_HEAD}")
    if MAPPING not in layout.places:
        if config.draft_vocab_size == config.vocab_size:
            return
        raise CheckpointError(
            f"{SINGLE}: the draft has no {MAPPING!r}, but drafts {config.draft_vocab_size} of {config.vocab_size} "
            f"tokens: {_AGAIN}"
        )
    dtype, shape, first, last = layout.places[MAPPING]
    fits = dtype in _MAPPING_DTYPES and last - first == math.prod(shape) * _MAPPING_DTYPES[dtype].itemsize
    if not fits or shape != (config.draft_vocab_size,):
        raise CheckpointError(f"{SINGLE}: {MAPPING!r} must hold {config.draft_vocab_size} integers: {_AGAIN}")


def _read(path: Path, layout: Layout, names: list[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors into private memory."""
    dtypes = {**FLOATING, **_MAPPING_DTYPES}
    tensors = {}
    with open(open_file(path, CheckpointError, _AGAIN), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != layout.size:
            raise damaged(path, CheckpointError, _AGAIN, "it changed while it was read")
        for name in names:
            dtype, shape, first, last = layout.places[name]
            content = np.empty(last - first, np.uint8)
            try:
                read_fully(file.fileno(), content, first)
            except (OSError, EOFError) as problem:
                raise damaged(path, CheckpointError, _AGAIN, problem) from None
            tensors[name] = torch.from_numpy(content).view(dtypes[dtype]).view(shape)
    return tensors


def _mapping(stored: torch.Tensor | None, config: EagleConfig) -> torch.Tensor:
    """Return the checked `d2t` as int64; zeros for a head without it, which drafts all tokens."""
    if stored is None:
        return torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    offsets = stored.to(torch.int64)
    # compare instead of adding: a sum could overflow
    own = torch.arange(len(offsets))
    if not bool(((offsets >= -own) & (offsets < config.vocab_size - own)).all()):
        raise CheckpointError(
            f"{SINGLE}: {MAPPING!r} has an entry outside of the vocabulary of {config.vocab_size}: {_AGAIN}"
        )
    return offsets
