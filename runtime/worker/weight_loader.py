"""Load a program's weights from a checkpoint, or make random ones, one recipe at a time: the 16-bit and the quantized
model are never in memory together.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...compiler.graph.materialize import materialize
from ...compiler.graph.recipe import Recipe
from ...graphs.checkpoint import Checkpoint
from ...graphs.config import LlamaConfig
from .progress import progress

Lookup = Callable[[str], Any]
"""Returns a tensor by name, or an `ExpertStack`, which is put together on the device."""
ReadWeights = Callable[[Mapping[str, torch.Tensor] | None], dict[str, torch.Tensor]]
"""Returns weights by name, in the given tensors or in new ones."""
DUMMY_STD = 0.02


def checkpoint_lookup(
    directory: Path, expected: Mapping[str, tuple[int, ...]], config: LlamaConfig
) -> tuple[Lookup, list[str]]:
    """Return (lookup, names in file order) of a checkpoint with exactly `expected`. Raises CheckpointError."""
    checkpoint = Checkpoint(directory, config)
    checkpoint.validate(expected, config.tie_word_embeddings)
    return checkpoint.stored, checkpoint.names()


def dummy_lookup(
    expected: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Lookup, list[str]]:
    """Return the same for random weights, given by seed, name and kind of device; norms are one."""

    def lookup(name: str) -> torch.Tensor:
        shape = expected[name]
        if len(shape) == 1 and not name.endswith(".bias"):
            return torch.ones(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) & (2**63 - 1))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, DUMMY_STD, generator=generator)

    return lookup, list(expected)


def load_weights(
    recipes: Mapping[str, Recipe],
    lookup: Lookup,
    names: Iterable[str],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    show_progress: bool = False,
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return buffer name -> tensor on `device` for each recipe, loaded in the order of the checkpoint's files.

    names      the checkpoint's tensors in file order
    constants  tensors that follow from the model's config; they keep their dtype
    dtype      of the recipes' inputs; 8-bit tensors stay so, with fp32 scales
    into       tensors to fill instead of new ones
    """

    def find(name: str) -> Any:
        return constants[name] if name in constants else lookup(name)

    def to_device(name: str, tensor: Any) -> torch.Tensor:
        kept = name in constants or tensor.dtype.itemsize == 1
        wanted = torch.float32 if name.endswith(".weight_scale") else dtype
        moved: torch.Tensor = tensor.to(device=device, dtype=None if kept else wanted)
        return moved

    position = {name: index for index, name in enumerate(names)}

    def file_order(name: str) -> tuple[int, list[str]]:
        sources = sorted(recipes[name].sources())
        return min((position.get(source, -1) for source in sources), default=-1), sources

    order = sorted(recipes, key=file_order)
    weights: dict[str, torch.Tensor] = {}
    memo: dict[Recipe, Any] = {}
    sources: frozenset[str] = frozenset()
    for name in progress(order, "loading weights", "tensor", show_progress):
        # values and scales of one quantized weight share intermediate results
        if recipes[name].sources() != sources:
            memo, sources = {}, recipes[name].sources()
        value = materialize(recipes[name], find, memo, to_device).to(device)
        weights[name] = value.contiguous() if into is None else into[name].copy_(value)
    return weights
