"""A trained draft from its directory to what `TrainedDraft` runs: config, programs, weights, and what they take."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ...compiler.api import CompiledModel, compile_model
from ...compiler.graph.recipe import Recipe
from ...compiler.options import CompileOptions, OptionError
from ...compiler.pipeline import Pass
from ...compiler.program.cache import ProgramCache
from ...compiler.program.program import Program
from ...graphs.draft.config import EagleConfig
from ...graphs.draft.eagle import EMBEDDING, MAPPING
from ...graphs.draft.steps import ChainStep, FirstPass
from ...graphs.draft.weights import read_eagle_tensors
from ...graphs.lora import LoraShape
from .buckets import Buckets
from .capacity import Demand, Specs, kv_specs, nbytes, specs_of
from .trained_draft import PREFIX, TrainedDraft, draft_bytes
from .weights import Source, load_weights

TARGET_EMBEDDING = "model.embed_tokens.weight"
MakeCache = Callable[[Mapping[str, object]], ProgramCache | None]


@dataclass(frozen=True)
class DraftSource:
    """The weights of a head, at the start and whenever they are to be read again. The embedding is not among them."""

    recipes: Mapping[str, Recipe]
    directory: Path
    config: EagleConfig
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    dtype: torch.dtype

    def read(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The weights by name. Raises CheckpointError."""
        stored = read_eagle_tensors(self.directory, self.config)
        constants = {**self.constants, MAPPING: stored[MAPPING]}
        return load_weights(
            self.recipes, stored.__getitem__, list(stored), constants, self.device, self.dtype, into=into
        )


@dataclass(frozen=True)
class Sources:
    """Several as one."""

    parts: tuple[Source, ...]

    def read(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The weights of all by name."""
        found: dict[str, torch.Tensor] = {}
        for part in self.parts:
            found |= part.read(into)
        return found


class DraftParts:
    """A head that is compiled.

    config    its config
    largest   the first pass that needs the most memory
    """

    def __init__(
        self,
        config: EagleConfig,
        directory: Path,
        lora: LoraShape | None,
        options: CompileOptions,
        passes: tuple[Pass, ...],
        dtype: torch.dtype,
        cache: MakeCache,
        buckets: Buckets,
    ) -> None:
        self.config, self._directory, self._dtype = config, directory, dtype
        # nothing was calibrated or rounded for it, and its layer has no number
        options = replace(
            options,
            hadamard=True,
            center_keys=False,
            balance_keys=False,
            rotate_values=False,
            smooth_channels=False,
            rounded_weights=False,
            check_counts=False,
        )
        compiled = []
        for kind in (FirstPass, ChainStep):
            parts = {"draft": kind.__name__, "config": asdict(config), "lora": None if lora is None else asdict(lora)}
            module = kind(config, lora, dtype=dtype, device="meta")
            kept = replace(found, options=options) if (found := cache(parts)) is not None else None
            compiled.append(compile_model(module, options, passes=passes, cache=kept, text=False))
            self._constants = module.derived_tensors()
        self.first: CompiledModel = compiled[0]
        self.chain: CompiledModel = compiled[1]
        self.largest = self.first.program(buckets.largest())

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Of the weights that are the head's own, by the names that they have among the target's."""
        return {name: recipe for name, recipe in self._recipes("weight").items() if recipe.sources() != {EMBEDDING}}

    @property
    def stack_recipes(self) -> dict[str, Recipe]:
        """Of the adapters' stacks, by the names that they have among the target's."""
        return self._recipes("adapter")

    def _recipes(self, kind: str) -> dict[str, Recipe]:
        found = self.largest.of_kind(kind)
        return {PREFIX + buffer.name: self.largest.recipes[buffer.name] for buffer in found}

    @property
    def weight_specs(self) -> Specs:
        """Of `recipes`."""
        return {name: spec for name, spec in _named(specs_of(self.largest, "weight")).items() if name in self.recipes}

    @property
    def stack_specs(self) -> Specs:
        """Of `stack_recipes`."""
        return _named(specs_of(self.largest, "adapter"))

    def cache_specs(self, pages: int) -> Specs:
        """Of the keys and values: a layer more."""
        return _named(kv_specs(self.largest, pages))

    def demand(self, buckets: Buckets) -> Demand:
        """Bytes besides the target's."""
        rows = max(buckets.max_num_batched_tokens, buckets.sampled_rows)
        kept = draft_bytes(self.config, buckets.max_num_seqs, rows, self._dtype.itemsize)
        activations = self.largest.arena_bytes + kept
        pages = nbytes(self.cache_specs(1))
        return Demand(nbytes(self.weight_specs), nbytes(self.stack_specs), activations, pages, 0)

    def source(self, device: torch.device) -> DraftSource:
        """Where the weights come from."""
        return DraftSource(self.recipes, self._directory, self.config, self._constants, device, self._dtype)

    def make(
        self, tensors: Mapping[str, torch.Tensor], target: Program, buckets: Buckets, device: torch.device
    ) -> TrainedDraft:
        """What runs, on `tensors`: the head's by their names among the target's, and the target's embedding."""
        own = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
        for buffer in self.largest.of_kind("weight"):
            if self.largest.recipes[buffer.name].sources() == {EMBEDDING}:
                own[buffer.name] = tensors[_embedding(target)]
        return TrainedDraft(self.config, self.first, self.chain, own, buckets, device, self._dtype)


def _embedding(target: Program) -> str:
    """The name of the target's embedding as it is looked up. A factor that is folded into it changes nothing: the head
    norms it.
    """
    looked_up = (step.args[1].buffer for step in target.steps if step.op == "sidestream.embedding")
    found = next((name for name in looked_up if target.recipes[name].sources() == {TARGET_EMBEDDING}), None)
    if found is None:
        raise OptionError("draft= needs the model's embedding, which disable_passes changes; leave lift_embedding on")
    return found


def _named(specs: Specs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {PREFIX + name: spec for name, spec in specs.items()}
