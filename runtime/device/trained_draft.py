"""A trained draft on the device: its first pass over the rows of each step, and the chain that drafts for the next.

After a step's tokens are sampled the first pass runs over the step's own rows, with the target's hidden states: it
stores the draft's keys and values, and leaves for each sequence the first draft and the hidden state that a chain goes
on from. The chain runs before the next step, of whose plan it knows how many drafts are wanted and which pages the
sequences have by then. Its own keys and values are overwritten by that step's first pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...compiler.api import CompiledModel
from ...compiler.program.program import Bucket
from ...compiler.run.captured import capture
from ...compiler.run.emit import BoundProgram
from ...graphs.draft.config import EagleConfig
from ...ops.core.kv_layout import PAGE_SIZE
from ..requests.checks import MAX_DRAFTS
from ..steps.plan import DRAFT_SIZES, VERIFIED_ROWS, StepPlan
from .buckets import Buckets
from .programs import ReadyPrograms

PREFIX = "draft."
"""Before the names of the draft's weights, stacks and caches where they lie among the target's."""
ALIGNED = 16
STAGED = ("state_rows", "chain_counts", "chain_slots", "last_rows")
"""Of each step, one for each sequence: see `TrainedDraft.stage`."""


@dataclass
class First:
    """A bucket's first pass, bound to the inputs of the target's program."""

    bound: BoundProgram
    tokens: torch.Tensor
    chosen: torch.Tensor
    query_start: torch.Tensor | None = None
    """Where the target's program has none to share."""


@dataclass
class Chain:
    """The chain of a batch size: `steps[m]` is bound to draft the token m + 1 places after the first."""

    bucket: Bucket
    steps: list[BoundProgram]
    graphs: dict[int, Any]


def draft_bytes(config: EagleConfig, sequences: int, rows: int, itemsize: int) -> int:
    """Device memory of what the draft keeps between steps, but for its programs: hidden states of the target for `rows`
    rows, and its own of a chain.
    """
    return itemsize * config.hidden_size * (3 * rows + (MAX_DRAFTS + 2) * (sequences + 1))


class TrainedDraft:
    """What runs of a head. `first`, `chain`: compiled; `tensors`: their weights, stacks and caches by name.

    A step goes `stage` (host arrays), `chain` (drafts for this step's sequences), the target, sampling, `follow`.
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
        sequences = max(most, buckets.logit_rows)  # a step that scores prompts has rows of logits beyond its sequences
        self._counting = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        self._ahead = torch.arange(MAX_DRAFTS - 1, dtype=torch.int32, device=device)[:, None]
        self._arena = make(0, dtype=torch.uint8)
        self._chains: ReadyPrograms[Chain] = ReadyPrograms()
        self._staged: Mapping[str, torch.Tensor] = {}
        self._lengths = self._counting

    def use(self, staged: Mapping[str, torch.Tensor], lengths: torch.Tensor) -> None:
        """Where the arrays of `stage` lie on the device, and the lengths of the histories [R]."""
        self._staged, self._lengths = staged, lengths

    def feature(self, place: int, rows: int) -> torch.Tensor:
        """Where the target's program of so many rows puts the hidden states of a feature's layer."""
        return self._features[place][:rows]

    def bind_first(self, bucket: Bucket, inputs: Mapping[str, torch.Tensor], features: Sequence[torch.Tensor]) -> First:
        """The first pass of a bucket, on the inputs of the target's program and what that returns."""
        tokens = torch.zeros(bucket.tokens, dtype=torch.int64, device=self._device)
        chosen = self._counting[: bucket.sequences]
        own = {"input_ids": tokens, "chosen_rows": chosen if bucket.decode else torch.zeros_like(chosen)}
        own |= {f"features_{place}": feature for place, feature in enumerate(features)}
        start = None
        if "query_start" not in inputs:
            own["query_start"] = self._counting[: bucket.sequences + 1]
            if not bucket.decode:
                own["query_start"] = start = torch.zeros_like(own["query_start"])
        bound = self._bind(self._first, bucket, {**self._tensors, **inputs, **own})
        return First(bound, tokens, own["chosen_rows"], start)

    def stage(self, host: Mapping[str, Any], plan: StepPlan) -> None:
        """Fill in the step's arrays: each sequence's row of what is kept between steps, how many drafts it computes,
        its adapter's slot, and its last query token's row.
        """
        count = plan.num_sequences
        padding = (self._rows, -1, -1, 0)
        for name, value in zip(STAGED, padding, strict=True):
            host[name][count:] = value
        host["state_rows"][:count] = plan.follow_rows
        host["state_rows"][:count][plan.follow_rows < 0] = self._rows
        host["chain_counts"][:count] = plan.drafts
        host["chain_slots"][:count] = plan.adapter_index[plan.query_start[:-1]]
        host["last_rows"][:count] = plan.query_start[1:] - 1

    def chain(self, plan: StepPlan, block_table: torch.Tensor, most: int) -> torch.Tensor:
        """`most` drafts for each of the plan's sequences [B, most] int32; of one that computes fewer only as many mean
        anything.
        """
        count = min(len(block_table), self._rows)
        self._block_table[:count].copy_(block_table[:count])
        chain = self._chains.get(self._buckets.pick_chain(plan), self._make_chain)
        graph = chain.graphs.get(next(size for size in DRAFT_SIZES if size >= most))
        if graph is None:
            self._run_chain(chain, most)
        else:
            graph.replay()
        return self._drafts[:most, : plan.num_sequences].to(torch.int32).t().contiguous()

    def follow(
        self,
        first: First,
        plan: StepPlan,
        input_ids: torch.Tensor,
        sampled: torch.Tensor,
        accepted: torch.Tensor,
        query_start: torch.Tensor,
    ) -> None:
        """The first pass over a step that has been sampled. `sampled`: as `StepResult.tokens`; `accepted` [B]: drafts
        that hold; input_ids: of the target's program; query_start [B + 1].
        """
        tokens, count = plan.num_tokens, plan.num_sequences
        if first.query_start is not None:
            first.query_start.fill_(tokens)
            first.query_start[: count + 1].copy_(query_start[: count + 1])
        last_rows = self._staged["last_rows"][:count]
        # -1: no token; the embedding's kernel reads it as zeros, its reference would raise
        drawn = sampled.clamp_min(0) if self._device.type == "cpu" else sampled
        if plan.verifies:
            first.tokens[:tokens].copy_(drawn[:tokens])
            torch.add(query_start[:count], accepted, out=first.chosen[:count])
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
        rows = self._staged["state_rows"][:count]
        self._tokens.index_copy_(0, rows, drafted[:count])
        self._hidden.index_copy_(0, rows, hidden[:count])

    def bound_chains(self) -> list[BoundProgram]:
        """One program of each batch size that has drafts, for kernels to be compiled ahead."""
        return [self._chains.get(bucket, self._make_chain).steps[0] for bucket in self._buckets.chain_buckets()]

    def capture_chains(self, pool: Any) -> Any:
        """Record each batch size's chains as CUDA graphs; returns the pool of their memory."""
        for bucket in self._buckets.chain_buckets():
            chain = self._chains.get(bucket, self._make_chain)
            for most in DRAFT_SIZES:
                if bucket.sequences * (1 + most) <= VERIFIED_ROWS and most < self._buckets.most_rows:
                    run = partial(self._run_chain, chain, most)
                    graph = capture(self._device, partial(_prepare, chain, run), run, pool)
                    chain.graphs[most], pool = graph, graph.pool()
        return pool

    def timed(self, bucket: Bucket) -> Callable[[], None]:
        """The chain that a step of this bucket needs, for `time_programs`."""
        most = bucket.rows - 1
        if not most:
            return lambda: None
        chain = self._chains.get(self._buckets.chain_bucket(bucket.sequences, bucket.lora), self._make_chain)
        graph = chain.graphs.get(most)
        return partial(self._run_chain, chain, most) if graph is None else graph.replay

    def _run_chain(self, chain: Chain, most: int) -> None:
        """Lay the rows of a chain out, and run them."""
        size = chain.bucket.sequences
        rows = self._staged["state_rows"][:size]
        torch.index_select(self._tokens, 0, rows, out=self._drafts[0, :size])
        if most == 1:
            return
        torch.index_select(self._hidden, 0, rows, out=self._states[0, :size])
        steps = most - 1
        begin = self._lengths.index_select(0, rows.clamp_max(self._rows - 1)) - 1
        places = begin + self._ahead[:steps]
        # what a sequence does not draft may lie beyond its pages
        wanted = self._ahead[:steps] + 1 < self._staged["chain_counts"][:size]
        blocks = (places // PAGE_SIZE).clamp(0, self._block_table.shape[1] - 1).t().to(torch.int64)
        pages = self._block_table[:size].gather(1, blocks).t()
        self._places["positions"][:steps, :size].copy_(torch.where(wanted, places, 0))
        self._places["slot_mapping"][:steps, :size].copy_(
            torch.where(wanted, pages * PAGE_SIZE + places % PAGE_SIZE, -1)
        )
        self._places["context_lens"][:steps, :size].copy_(torch.where(wanted, places + 1, 0))
        for step in chain.steps[:steps]:
            step.run()

    def _make_chain(self, bucket: Bucket) -> Chain:
        program, size = self._chain.program(bucket), bucket.sequences
        shared = {
            "block_table": self._block_table[:size],
            "query_start": self._counting[: size + 1],
            "adapter_index": self._staged["chain_slots"][:size],
        }
        drafted, hidden = (view.buffer for view in program.outputs)
        steps = [
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
        return Chain(bucket, steps, {})

    def _bind(self, compiled: CompiledModel, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> BoundProgram:
        needed = compiled.program(bucket).arena_bytes
        if needed > self._arena.numel():
            self._arena = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return compiled.bind(bucket, tensors, device=self._device, arena=self._arena)


def _prepare(chain: Chain, run: Callable[[], None]) -> None:
    """Compile and load what a chain launches; where no step has been staged it stores nothing."""
    chain.steps[0].prepare()
    run()
