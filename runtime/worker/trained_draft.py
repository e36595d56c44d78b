"""A trained draft on the device: its first pass over the rows of each step, and the chain that drafts for the next.

After a step's tokens are sampled the first pass runs over the step's own rows, with the target's hidden states: it
stores the draft's keys and values, and leaves for each sequence the first draft and the hidden state that a chain goes
on from. The chain runs before the next step, of whose plan it knows how many drafts are wanted and which pages the
sequences have by then. Its own keys and values are overwritten by that step's first pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...compiler.api import CompiledModel
from ...compiler.program.program import Bucket
from ...compiler.run.emit import BoundProgram
from ...graphs.draft.config import EagleConfig
from ...ops.core.kv_layout import PAGE_SIZE
from ..api.checks import MAX_DRAFTS
from ..scheduler.step_plan import StepPlan
from .buckets import Buckets
from .inputs.step_inputs import Beyond
from .programs import ReadyPrograms

PREFIX = "draft."
"""Before the names of the draft's weights, stacks and caches where they lie among the target's."""
ALIGNED = 16


@dataclass
class First:
    """A bucket's first pass, bound to the inputs of the target's program."""

    bound: BoundProgram
    tokens: torch.Tensor
    chosen: torch.Tensor


def draft_bytes(config: EagleConfig, sequences: int, rows: int, itemsize: int) -> int:
    """Device memory of what the draft keeps between steps, but for its programs: hidden states of the target for `rows`
    rows, and its own of a chain.
    """
    return itemsize * config.hidden_size * (3 * rows + (MAX_DRAFTS + 2) * (sequences + 1))


class TrainedDraft:
    """What runs of a head. `first`, `chain`: compiled; `tensors`: their weights, stacks and caches by name.

    A step goes `values` (host arrays of `fields`), `chain` (drafts for this step's sequences), the target, sampling,
    `follow`.
    """

    def __init__(
        self,
        config: EagleConfig,
        first: CompiledModel,
        chain: CompiledModel,
        tensors: Mapping[str, torch.Tensor],
        buckets: Buckets,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._first, self._chain = first, chain
        self._tensors = dict(tensors)
        self._buckets, self._device = buckets, device
        most, width = buckets.max_num_seqs, config.hidden_size
        self._rows = most
        self.fields = (
            Beyond("state_rows", torch.int64, most),
            Beyond("chain_slots", torch.int32, -1),
            Beyond("last_rows", torch.int64, 0),
        )
        rows = max(buckets.max_num_batched_tokens, buckets.sampled_rows)
        make = partial(torch.zeros, device=device)
        self._features = [make(rows, width, dtype=dtype) for _ in config.feature_layers]
        # one row more, for sequences of which nothing is kept
        self._tokens, self._hidden = make(most + 1, dtype=torch.int64), make(most + 1, width, dtype=dtype)
        columns = -(-most // ALIGNED) * ALIGNED  # each step's row begins where kernels find memory aligned
        self._drafts = make(MAX_DRAFTS, columns, dtype=torch.int64)
        self._states = make(MAX_DRAFTS, columns, width, dtype=dtype)
        self._places = {
            "positions": make(MAX_DRAFTS - 1, columns, dtype=torch.int64),
            "slot_mapping": torch.full((MAX_DRAFTS - 1, columns), -1, dtype=torch.int32, device=device),
            "context_lens": make(MAX_DRAFTS - 1, columns, dtype=torch.int32),
        }
        self._block_table = make(most, buckets.blocks, dtype=torch.int32)
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        sequences = max(most, buckets.logit_rows)  # a step that scores prompts has rows of logits beyond its sequences
        self._counting = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        self._ahead = torch.arange(MAX_DRAFTS - 1, dtype=torch.int32, device=device)[:, None]
        self._arena = make(0, dtype=torch.uint8)
        self._chains: ReadyPrograms[list[BoundProgram]] = ReadyPrograms()

    def feature(self, place: int, rows: int) -> torch.Tensor:
        """Where the target's program of so many rows puts the hidden states of a feature's layer."""
        return self._features[place][:rows]

    def bind_first(
        self, bucket: Bucket, inputs: Mapping[str, torch.Tensor], query_start: torch.Tensor, features: Sequence[Any]
    ) -> First:
        """The first pass of a bucket, on the inputs of the target's program and what that returns; `query_start`: of
        the step, also where that program does without.
        """
        tokens = torch.zeros(bucket.tokens, dtype=torch.int64, device=self._device)
        chosen = self._counting[: bucket.sequences]
        own = {"input_ids": tokens, "chosen_rows": chosen if bucket.decode else torch.zeros_like(chosen)}
        own |= {f"features_{place}": feature for place, feature in enumerate(features)}
        if "query_start" not in inputs:
            own["query_start"] = self._counting[: bucket.sequences + 1] if bucket.decode else query_start
        bound = self._bind(self._first, bucket, {**self._tensors, **inputs, **own})
        return First(bound, tokens, own["chosen_rows"])

    def values(self, plan: StepPlan) -> dict[str, Any]:
        """What the arrays of `fields` hold for a step: each sequence's row of what is kept between steps, its adapter's
        slot, and its last query token's row.
        """
        return {
            "state_rows": np.where(plan.follow_rows < 0, self._rows, plan.follow_rows),
            "chain_slots": plan.adapter_index[plan.query_start[:-1]],
            "last_rows": plan.query_start[1:] - 1,
        }

    def chain(
        self, staged: Mapping[str, torch.Tensor], lengths: torch.Tensor, block_table: torch.Tensor, bucket: Bucket
    ) -> torch.Tensor:
        """Drafts [S, K] int32 of a step with drafts of this bucket, for each of its S sequences as many as it has rows
        for; of a sequence that computes fewer only as many mean anything. `lengths` [R]: of the histories.
        """
        size, most = bucket.sequences, bucket.rows - 1
        chain = self._chains.get(self._buckets.chain_bucket(size, bucket.lora), self._make_chain)
        rows = staged["state_rows"]
        torch.index_select(self._tokens, 0, rows, out=self._drafts[0, :size])
        if most > 1:
            self._slots[:size].copy_(staged["chain_slots"])
            self._block_table[:size].copy_(block_table[:size])
            torch.index_select(self._hidden, 0, rows, out=self._states[0, :size])
            self._lay_out(lengths.index_select(0, rows.clamp_max(self._rows - 1)), staged["counts"], most - 1)
            for step in chain[: most - 1]:
                step.run()
        return self._drafts[:most, :size].to(torch.int32).t().contiguous()

    def _lay_out(self, lengths: torch.Tensor, counts: torch.Tensor, steps: int) -> None:
        """Where the rows of a chain's steps stand."""
        size = len(lengths)
        places = lengths - 1 + self._ahead[:steps]
        # what a sequence does not draft may lie beyond its pages
        wanted = self._ahead[:steps] + 1 < counts
        blocks = (places // PAGE_SIZE).clamp(0, self._block_table.shape[1] - 1).t().to(torch.int64)
        pages = self._block_table[:size].gather(1, blocks).t()
        self._places["positions"][:steps, :size].copy_(torch.where(wanted, places, 0))
        self._places["slot_mapping"][:steps, :size].copy_(
            torch.where(wanted, pages * PAGE_SIZE + places % PAGE_SIZE, -1)
        )
        self._places["context_lens"][:steps, :size].copy_(torch.where(wanted, places + 1, 0))

    def follow(
        self,
        first: First,
        plan: StepPlan,
        staged: Mapping[str, torch.Tensor],
        input_ids: torch.Tensor,
        sampled: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        """The first pass over a step that has been sampled. `staged`: its arrays of `fields`, and query_start;
        `sampled`: as `StepResult.tokens`; `accepted` [B]: drafts that hold; input_ids: of the target's program.
        """
        tokens, count = plan.num_tokens, plan.num_sequences
        last_rows = staged["last_rows"][:count]
        # -1: no token; the embedding's kernel reads it as zeros, its reference would raise
        drawn = sampled.clamp_min(0) if self._device.type == "cpu" else sampled
        if plan.verifies:
            first.tokens[:tokens].copy_(drawn[:tokens])
            torch.add(staged["query_start"][:count], accepted[:count], out=first.chosen[:count])
        else:
            after = drawn[:count]
            if (plan.next_tokens >= 0).any():
                known = torch.from_numpy(plan.next_tokens)
                if self._device.type == "cuda":
                    known = known.pin_memory().to(self._device, non_blocking=True)
                after = torch.where(known >= 0, known, after)
            if plan.decode:
                first.tokens[:count].copy_(after)
            else:
                first.tokens[: tokens - 1].copy_(input_ids[1:tokens])
                first.tokens.index_copy_(0, last_rows, after.to(torch.int64))
                first.chosen[:count].copy_(last_rows)
        drafted, hidden = first.bound.replay()
        rows = staged["state_rows"][:count]
        self._tokens.index_copy_(0, rows, drafted[:count])
        self._hidden.index_copy_(0, rows, hidden[:count])

    def bound_chains(self) -> list[BoundProgram]:
        """One program of each batch size that has drafts, for kernels to be compiled ahead."""
        return [self._chains.get(bucket, self._make_chain)[0] for bucket in self._buckets.chain_buckets()]

    def _make_chain(self, bucket: Bucket) -> list[BoundProgram]:
        """The chain of a batch size: step m drafts the token m + 1 places after the first."""
        program, size = self._chain.program(bucket), bucket.sequences
        shared = {
            "block_table": self._block_table[:size],
            "query_start": self._counting[: size + 1],
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
                    **{name: place[step, :size] for name, place in self._places.items()},
                    "input_ids": self._drafts[step, :size],
                    "hidden_states": self._states[step, :size],
                    drafted: self._drafts[step + 1, :size],
                    hidden: self._states[step + 1, :size],
                },
            )
            for step in range(MAX_DRAFTS - 1)
        ]

    def _bind(self, compiled: CompiledModel, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> BoundProgram:
        needed = compiled.program(bucket).arena_bytes
        if needed > self._arena.numel():
            self._arena = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return compiled.bind(bucket, tensors, device=self._device, arena=self._arena)
