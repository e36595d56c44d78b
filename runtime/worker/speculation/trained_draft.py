"""A trained draft (EAGLE head): compile it, load its weights, and run it after each step.

After sampling, the first pass runs over the step's rows with the target's hidden states. It stores the draft's keys and
values, and for each sequence the first draft token and the hidden state for the chain. The chain runs before the next
step, because that step's plan has the number of drafts and the pages. The first pass of that step overwrites the keys
and values of the chain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....compiler.api import CompiledModel, compile_model
from ....compiler.graph.recipe import Recipe
from ....compiler.options import CompileOptions, OptionError
from ....compiler.pipeline import Pass
from ....compiler.program.cache import ProgramCache
from ....compiler.program.program import Bucket, Program
from ....compiler.run.bound_program import BoundProgram
from ....graphs.draft.config import EagleConfig
from ....graphs.draft.eagle import EMBEDDING, MAPPING
from ....graphs.draft.steps import ChainStep, FirstPass
from ....graphs.draft.weights import read_eagle_tensors
from ....graphs.lora import LoraShape
from ....ops.core.kv_layout import PAGE_SIZE
from ...api.checks import MAX_DRAFTS
from ...scheduler.step_plan import StepPlan
from ..buckets import Buckets
from ..memory_budget import MemoryDemand, Specs, kv_specs, nbytes, specs_of
from ..programs.bound_programs import BoundPrograms
from ..step_inputs import ExtraInput
from ..weight_loader import load_weights

PREFIX = "draft."
"""Prefix of the draft's weights, stacks and caches among the target's."""
TARGET_EMBEDDING = "model.embed_tokens.weight"
ALIGNED_COLUMNS = 16  # each step's row starts at aligned memory
MakeCache = Callable[[Mapping[str, object]], ProgramCache | None]


class DraftModel:
    """A compiled head. `largest`: the first pass that needs the most memory."""

    def __init__(
        self,
        config: EagleConfig,
        directory: Path,
        lora: LoraShape | None,
        options: CompileOptions,
        passes: tuple[Pass, ...],
        dtype: torch.dtype,
        make_cache: MakeCache,
        buckets: Buckets,
    ) -> None:
        self.config, self.dtype, self._directory = config, dtype, directory
        # a head has no calibration, no rounded weights and no layer number
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
            key = {"draft": kind.__name__, "config": asdict(config), "lora": None if lora is None else lora.key}
            module = kind(config, lora, dtype=dtype, device="meta")
            cache = replace(made, options=options) if (made := make_cache(key)) is not None else None
            compiled.append(compile_model(module, options, passes=passes, cache=cache, text=False))
            self._constants = module.derived_tensors()
        self.first_pass: CompiledModel = compiled[0]
        self.chain: CompiledModel = compiled[1]
        self.largest = self.first_pass.program(buckets.largest())

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Recipes of the head's own weights, by prefixed name."""
        return {name: recipe for name, recipe in self._recipes("weight").items() if recipe.sources() != {EMBEDDING}}

    @property
    def stack_recipes(self) -> dict[str, Recipe]:
        """Recipes of the adapter stacks, by prefixed name."""
        return self._recipes("adapter")

    def _recipes(self, kind: str) -> dict[str, Recipe]:
        buffers = self.largest.of_kind(kind)
        return {PREFIX + buffer.name: self.largest.recipes[buffer.name] for buffer in buffers}

    @property
    def weight_specs(self) -> Specs:
        """Shape and dtype of `recipes`' tensors."""
        return {
            name: spec for name, spec in _prefixed(specs_of(self.largest, "weight")).items() if name in self.recipes
        }

    @property
    def stack_specs(self) -> Specs:
        """Shape and dtype of `stack_recipes`' tensors."""
        return _prefixed(specs_of(self.largest, "adapter"))

    def cache_specs(self, pages: int) -> Specs:
        """Shape and dtype of the head's KV cache."""
        return _prefixed(kv_specs(self.largest, pages))

    def demand(self, buckets: Buckets) -> MemoryDemand:
        """Return the head's memory demand: tensors, the target's hidden states for a step, its own for a chain."""
        rows = max(buckets.max_num_batched_tokens, buckets.sampled_rows)
        states = 3 * rows + (MAX_DRAFTS + 2) * (buckets.max_num_seqs + 1)
        activations = self.largest.arena_bytes + self.dtype.itemsize * self.config.hidden_size * states
        page = nbytes(self.cache_specs(1))
        return MemoryDemand(nbytes(self.weight_specs), nbytes(self.stack_specs), activations, page, 0)

    def read_weights(
        self, device: torch.device, into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the head's own weights by prefixed name, in tensors of `into` or new ones. Raises CheckpointError."""
        stored = read_eagle_tensors(self._directory, self.config)
        constants = {**self._constants, MAPPING: stored[MAPPING]}
        return load_weights(self.recipes, stored.__getitem__, list(stored), constants, device, self.dtype, into=into)

    def bind(
        self, tensors: Mapping[str, torch.Tensor], target: Program, buckets: Buckets, device: torch.device
    ) -> "TrainedDraft":
        """Return the draft that runs on `tensors`: the head's, by prefixed name, and the target's embedding."""
        own = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
        for buffer in self.largest.of_kind("weight"):
            if self.largest.recipes[buffer.name].sources() == {EMBEDDING}:
                own[buffer.name] = tensors[_embedding(target)]
        return TrainedDraft(self, own, buckets, device)


def _embedding(target: Program) -> str:
    """Return the buffer name of the target's embedding; its scale is irrelevant: the head normalizes it."""
    lookups = (step.args[1].buffer for step in target.steps if step.op == "sidestream.embedding")
    name = next((name for name in lookups if target.recipes[name].sources() == {TARGET_EMBEDDING}), None)
    if name is None:
        raise OptionError("draft= needs the model's embedding, which disable_passes changes; leave lift_embedding on")
    return name


def _prefixed(specs: Specs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {PREFIX + name: spec for name, spec in specs.items()}


@dataclass
class BoundFirstPass:
    """The first pass of a bucket, bound to the inputs of the target's program."""

    bound: BoundProgram
    tokens: torch.Tensor
    chosen_rows: torch.Tensor


class TrainedDraft:
    """Runs a head: its first pass and its chain. `tensors`: weights, stacks and caches by name.

    A step calls `input_values`, `draft` (for this step's sequences), the target, sampling, `run_first_pass`.
    """

    def __init__(
        self, model: DraftModel, tensors: Mapping[str, torch.Tensor], buckets: Buckets, device: torch.device
    ) -> None:
        self._first_pass, self._chain = model.first_pass, model.chain
        self._tensors = dict(tensors)
        self._buckets, self._device = buckets, device
        config, dtype = model.config, model.dtype
        size, width = buckets.max_num_seqs, config.hidden_size
        self._no_row = size  # row of sequences without kept state
        self.extra_inputs = (
            ExtraInput("state_rows", torch.int64, size),
            ExtraInput("chain_slots", torch.int32, -1),
            ExtraInput("last_rows", torch.int64, 0),
        )
        rows = max(buckets.max_num_batched_tokens, buckets.sampled_rows)
        make = partial(torch.zeros, device=device)
        self._features = [make(rows, width, dtype=dtype) for _ in config.feature_layers]
        self._tokens, self._hidden = make(size + 1, dtype=torch.int64), make(size + 1, width, dtype=dtype)
        columns = -(-size // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
        self._drafts = make(MAX_DRAFTS, columns, dtype=torch.int64)
        self._states = make(MAX_DRAFTS, columns, width, dtype=dtype)
        self._chain_inputs = {
            "positions": make(MAX_DRAFTS - 1, columns, dtype=torch.int64),
            "slot_mapping": torch.full((MAX_DRAFTS - 1, columns), -1, dtype=torch.int32, device=device),
            "context_lens": make(MAX_DRAFTS - 1, columns, dtype=torch.int32),
        }
        self._block_table = make(size, buckets.blocks, dtype=torch.int32)
        self._slots = torch.full((size,), -1, dtype=torch.int32, device=device)
        sequences = max(size, buckets.logit_rows)  # scored prompt tokens have rows of logits too
        self._range = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        self._steps = torch.arange(MAX_DRAFTS - 1, dtype=torch.int32, device=device)[:, None]
        self._arena = make(0, dtype=torch.uint8)
        self._chains: BoundPrograms[list[BoundProgram]] = BoundPrograms()

    def feature_buffer(self, index: int, rows: int) -> torch.Tensor:
        """Return the output buffer [rows, width] for the target's hidden states of a feature layer."""
        return self._features[index][:rows]

    def bind_first_pass(
        self, bucket: Bucket, inputs: Mapping[str, torch.Tensor], query_start: torch.Tensor, features: Sequence[Any]
    ) -> BoundFirstPass:
        """Bind a bucket's first pass to the target's inputs and features; `query_start`: of the step."""
        tokens = torch.zeros(bucket.tokens, dtype=torch.int64, device=self._device)
        chosen = self._range[: bucket.sequences]
        own = {"input_ids": tokens, "chosen_rows": chosen if bucket.decode else torch.zeros_like(chosen)}
        own |= {f"features_{index}": feature for index, feature in enumerate(features)}
        if "query_start" not in inputs:
            own["query_start"] = self._range[: bucket.sequences + 1] if bucket.decode else query_start
        bound = self._bind(self._first_pass, bucket, {**self._tensors, **inputs, **own})
        return BoundFirstPass(bound, tokens, own["chosen_rows"])

    def input_values(self, plan: StepPlan) -> dict[str, Any]:
        """Return the values of `extra_inputs`: each sequence's row of kept state, adapter slot and last query row."""
        return {
            "state_rows": np.where(plan.follow_rows < 0, self._no_row, plan.follow_rows),
            "chain_slots": plan.adapter_index[plan.query_start[:-1]],
            "last_rows": plan.query_start[1:] - 1,
        }

    def draft(
        self, staged: Mapping[str, torch.Tensor], lengths: torch.Tensor, block_table: torch.Tensor, bucket: Bucket
    ) -> torch.Tensor:
        """Return drafts [S, K] int32 for a bucket of S sequences with K drafts each; those that a sequence does not
        compute are undefined. `lengths` [R]: of the token history.
        """
        size, num_drafts = bucket.sequences, bucket.rows - 1
        chain = self._chains.get(self._buckets.chain_bucket(size, bucket.lora), self._bind_chain)
        rows = staged["state_rows"]
        torch.index_select(self._tokens, 0, rows, out=self._drafts[0, :size])
        if num_drafts > 1:
            self._slots[:size].copy_(staged["chain_slots"])
            self._block_table[:size].copy_(block_table[:size])
            torch.index_select(self._hidden, 0, rows, out=self._states[0, :size])
            own_lengths = lengths.index_select(0, rows.clamp_max(self._no_row - 1))
            self._fill_chain_inputs(own_lengths, staged["counts"], num_drafts - 1)
            for step in chain[: num_drafts - 1]:
                step.run()
        return self._drafts[:num_drafts, :size].to(torch.int32).t().contiguous()

    def _fill_chain_inputs(self, lengths: torch.Tensor, counts: torch.Tensor, steps: int) -> None:
        size = len(lengths)
        places = lengths - 1 + self._steps[:steps]
        # drafts that a sequence does not compute may be outside its pages
        needed = self._steps[:steps] + 1 < counts
        blocks = (places // PAGE_SIZE).clamp(0, self._block_table.shape[1] - 1).t().to(torch.int64)
        pages = self._block_table[:size].gather(1, blocks).t()
        slots = torch.where(needed, pages * PAGE_SIZE + places % PAGE_SIZE, -1)
        self._chain_inputs["positions"][:steps, :size].copy_(torch.where(needed, places, 0))
        self._chain_inputs["slot_mapping"][:steps, :size].copy_(slots)
        self._chain_inputs["context_lens"][:steps, :size].copy_(torch.where(needed, places + 1, 0))

    def run_first_pass(
        self,
        first_pass: BoundFirstPass,
        plan: StepPlan,
        staged: Mapping[str, torch.Tensor],
        input_ids: torch.Tensor,
        sampled: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        """Run the first pass over a sampled step.

        staged     `extra_inputs` and query_start
        input_ids  of the target's program
        sampled    as `StepResult.tokens`
        accepted   [B]: numbers of accepted drafts
        """
        tokens, count = plan.num_tokens, plan.num_sequences
        last_rows = staged["last_rows"][:count]
        # -1 is no token: the embedding's kernel reads it as zeros, its reference would raise
        drawn = sampled.clamp_min(0) if self._device.type == "cpu" else sampled
        if plan.verifies:
            first_pass.tokens[:tokens].copy_(drawn[:tokens])
            torch.add(staged["query_start"][:count], accepted[:count], out=first_pass.chosen_rows[:count])
        else:
            following = drawn[:count]
            if (plan.next_tokens >= 0).any():
                known = torch.from_numpy(plan.next_tokens)
                if self._device.type == "cuda":
                    known = known.pin_memory().to(self._device, non_blocking=True)
                following = torch.where(known >= 0, known, following)
            if plan.decode:
                first_pass.tokens[:count].copy_(following)
            else:
                first_pass.tokens[: tokens - 1].copy_(input_ids[1:tokens])
                first_pass.tokens.index_copy_(0, last_rows, following.to(torch.int64))
                first_pass.chosen_rows[:count].copy_(last_rows)
        drafted, hidden = first_pass.bound.replay()
        rows = staged["state_rows"][:count]
        self._tokens.index_copy_(0, rows, drafted[:count])
        self._hidden.index_copy_(0, rows, hidden[:count])

    def bound_chains(self) -> list[BoundProgram]:
        """Return one program of each batch size with drafts, for compiling kernels ahead of time."""
        return [self._chains.get(bucket, self._bind_chain)[0] for bucket in self._buckets.chain_buckets()]

    def _bind_chain(self, bucket: Bucket) -> list[BoundProgram]:
        """Return the chain of a batch size: step m drafts the token m + 1 places after the first draft."""
        program, size = self._chain.program(bucket), bucket.sequences
        shared = {
            "block_table": self._block_table[:size],
            "query_start": self._range[: size + 1],
            "adapter_index": self._slots[:size],
        }
        drafted, hidden = (view.buffer for view in program.outputs)
        return [
            self._bind(
                self._chain,
                bucket,
                {
                    **self._tensors,
                    **shared,
                    **{name: values[step, :size] for name, values in self._chain_inputs.items()},
                    "input_ids": self._drafts[step, :size],
                    "hidden_states": self._states[step, :size],
                    drafted: self._drafts[step + 1, :size],
                    hidden: self._states[step + 1, :size],
                },
            )
            for step in range(MAX_DRAFTS - 1)
        ]

    def _bind(self, compiled: CompiledModel, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> BoundProgram:
        arena_bytes = compiled.program(bucket).arena_bytes
        if arena_bytes > self._arena.numel():
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=self._device)
        return compiled.bind(bucket, tensors, device=self._device, arena=self._arena)
