"""A program's weights, made from a checkpoint (or at random) one recipe at a time, so that 16-bit and quantized
copies never coexist.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...compiler.graph.recipe import Recipe, materialize
from ...graphs.checkpoint import Checkpoint
from ...graphs.config import LlamaConfig
from ..quantization.rounded_weights import Rounding
from .progress import progress

Lookup = Callable[[str], torch.Tensor]
DUMMY_STD = 0.02


def checkpoint_lookup(
    directory: Path, expected: Mapping[str, tuple[int, ...]], config: LlamaConfig
) -> tuple[Lookup, list[str]]:
    """(lookup, names in shard order) of a checkpoint that was found to hold exactly `expected`; tensors are views of
    its files, as they are stored.
    """
    checkpoint = Checkpoint(directory, config)
    checkpoint.validate(expected, config.tie_word_embeddings)
    return checkpoint.tensor, checkpoint.names()


def dummy_lookup(
    expected: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Lookup, list[str]]:
    """The same for random weights, which depend on seed and name only (on one kind of device): norms one, the rest
    normal with deviation 0.02.
    """

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
    """Buffer name -> tensor on `device` for each recipe, in the order of the checkpoint's files.

    `names`: the checkpoint's tensors in file order. `constants`: tensors that come from the model's config instead,
    kept in their own dtype. `dtype`: of what recipes compute with; what is stored in eight bits stays so, with its
    scales in fp32. `into`: tensors to fill, instead of new ones.
    """

    def find(name: str) -> torch.Tensor:
        return constants[name] if name in constants else lookup(name)

    def bring(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in constants or tensor.dtype.itemsize == 1:
            return tensor.to(device)
        return tensor.to(device=device, dtype=torch.float32 if name.endswith(".weight_scale") else dtype)

    position = {name: index for index, name in enumerate(names)}

    def place(name: str) -> tuple[int, list[str]]:
        sources = sorted(recipes[name].sources())
        return min((position.get(source, -1) for source in sources), default=-1), sources

    order = sorted(recipes, key=place)
    weights: dict[str, torch.Tensor] = {}
    memo: dict[Recipe, Any] = {}
    sources: frozenset[str] = frozenset()
    for name in progress(order, "loading weights", "tensor", show_progress):
        # values and scales of one quantized weight share their work, nothing else is kept
        if recipes[name].sources() != sources:
            memo, sources = {}, recipes[name].sources()
        value = materialize(recipes[name], find, memo, bring).to(device)
        weights[name] = value.contiguous() if into is None else into[name].copy_(value)
    return weights


class Source(Protocol):
    """What weights are read from."""

    def read(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The weights by name."""


@dataclass(frozen=True)
class WeightSource:
    """Where a program's weights come from, at the start and whenever they are to be read again.

    directory   the checkpoint's; None: they are random, of `seed`
    expected    the shapes of the checkpoint's tensors
    rounding    weights that were rounded before
    See `load_weights` for the others.
    """

    recipes: Mapping[str, Recipe]
    directory: Path | None
    expected: Mapping[str, tuple[int, ...]]
    config: LlamaConfig
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    dtype: torch.dtype
    seed: int
    show_progress: bool
    rounding: Rounding | None = None

    def read(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The weights by name. Raises CheckpointError, RoundingError or OSError."""
        if self.directory is None:
            lookup, names = dummy_lookup(self.expected, self.device, self.dtype, self.seed)
        else:
            lookup, names = checkpoint_lookup(self.directory, self.expected, self.config)
        if self.rounding is not None:
            lookup = self.rounding.before(lookup)
        return load_weights(
            self.recipes, lookup, names, self.constants, self.device, self.dtype, self.show_progress, into
        )
