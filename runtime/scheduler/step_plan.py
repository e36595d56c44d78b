"""The plan of one step, its results, and the interface of the runner that executes it.

Arrays are NumPy's, without a tensor or a device, so that a plan can cross a process boundary.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

AHEAD = 3
"""Most steps in flight: the running one, the next one, and one more after steps of few tokens."""
SCORED_ROWS = 128
"""Most rows of logits of a step for prompt log-probabilities, besides one per sequence."""
DRAFT_SIZES = (1, 3, 7)
"""Drafts per sequence for which there are programs; other numbers run in the next larger program."""
VERIFIED_ROWS = 256
"""Most query rows of a step with drafts: beyond that more rows take as long as more steps."""
CASCADE_SEQUENCES = 128
"""Fewest sequences of a decode step with cascade attention: with fewer, reading shared pages once gains little."""
RINGS = 64
"""Ring buffers for former answers on the device, one per adapter content."""
OWN_TOKENS, FORMER_ANSWERS, TRAINED_DRAFT = 0, 1, 2
"""Sources of a sequence's drafts."""


def drafts_within(sequences: int, budget: int) -> int:
    """Return the most drafts per sequence in a step of `budget` tokens."""
    rows = min(VERIFIED_ROWS, budget)
    return max((size for size in DRAFT_SIZES if sequences * (1 + size) <= rows), default=0)


def no_rows() -> Int32:
    """Return an empty array."""
    return np.zeros(0, np.int32)


def most_logits(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the most rows of logits of a step: one per sequence and those for prompt log-probabilities."""
    return min(max_num_seqs + SCORED_ROWS, max_num_batched_tokens)


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling of a step's rows; arrays are [B], or [T] in a step with drafts, which samples every row.

    greedy               every sampled row has temperature 0
    num_logprobs         likeliest tokens to report per row, -1 = none; num_prompt_logprobs: the same for scored prompts
    steps                output tokens so far; with follow_rows less the row's position, which the device adds
    bias_*               numbers to add to single logits, flat; -inf bans a token
    allowed_*            the only tokens of a row, flat; other rows may get all
    reported_*           tokens whose log-probabilities replace those of a row's likeliest ones, with their columns in
                         `StepResult.logprobs`, flat
    history_*            distinct tokens of penalized rows and their counts in the output, flat; 0 = in the prompt only

    Rows of flat arrays are rows of the logits.
    """

    greedy: bool
    num_logprobs: int
    num_prompt_logprobs: int
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: Int64
    steps: Int64
    bias_rows: Int32
    bias_tokens: Int32
    bias_values: Float32
    allowed_rows: Int32
    allowed_tokens: Int32
    reported_rows: Int32
    reported_columns: Int32
    reported_tokens: Int32
    history_rows: Int32
    history_tokens: Int32
    history_counts: Int32
    presence_penalty: Float32
    frequency_penalty: Float32
    repetition_penalty: Float32


@dataclass(frozen=True)
class StepPlan:
    """One step: T query tokens of B sequences, grouped by sequence.

    step                number of the step
    decode              each sequence has exactly one query token
    cascade             attention reads prefix pages that neighbouring sequences share once (`cascade`)
    input_ids [T]       0 for a token that is still on the device
    positions, slot_mapping [T], adapter_index [T]     adapter_index: -1 = base model
    adapter_numbers [B] each sequence's adapter, -1 = base model: the runner refuses a step whose slot holds another one
    block_table [B, P], context_lens [B], query_start [B + 1]   context_lens includes the query tokens
    logits_indices [R]  rows of each sequence's last query token, then of further scored tokens
    scored_rows, scored_tokens [N]   rows of the logits, and the prompt's next token to score there
    sample_rows [S]     sequences that get a new token; prompts that continue get none
    feed_positions, feed_rows [F]   input_ids[feed_positions] = last step's tokens[feed_rows], on the device
    masked_rows [M]     sampled sequences with a token mask: sampling waits for the step's StepMasks
    follow_rows [B]     row of each sequence's tokens on the device, -1 = none (its prompt continues). Empty in an
                        engine without speculation, as next_tokens
    drafts [B]          drafts after each sequence's last token; -1: all its tokens are in the plan. With drafts the
                        device fills in input_ids, positions and slot_mapping, and context_lens is an upper bound
    start_rows, start_lengths [N], start_tokens   sequences that the device tracks from now on, and all their tokens
    rings [B]           ring buffer of former answers to draft from, -1 = none
    ring_ends, ring_filled [B]   place after the ring's newest token, and number of valid tokens before it
    next_tokens [B]     the prompt's token after each sequence's last query token; -1: it is sampled
    kept [N, 5]         answers to copy into rings before the step: row of the sequence's tokens, first token, end,
                        ring, place in the ring
    slot_loads [L, 2]   (slot, adapter number) to load before the step; empty with asynchronous loads
    """

    step: int
    decode: bool
    input_ids: Int32
    positions: Int32
    slot_mapping: Int32
    adapter_index: Int32
    block_table: Int32
    context_lens: Int32
    query_start: Int32
    logits_indices: Int32
    scored_rows: Int32
    scored_tokens: Int32
    sample_rows: Int32
    feed_positions: Int32
    feed_rows: Int32
    slot_loads: Int32
    sampling: SamplingPlan
    masked_rows: Int32 = field(default_factory=no_rows)
    follow_rows: Int32 = field(default_factory=no_rows)
    drafts: Int32 = field(default_factory=no_rows)
    start_rows: Int32 = field(default_factory=no_rows)
    start_lengths: Int32 = field(default_factory=no_rows)
    start_tokens: Int32 = field(default_factory=no_rows)
    rings: Int32 = field(default_factory=no_rows)
    ring_ends: Int32 = field(default_factory=no_rows)
    ring_filled: Int32 = field(default_factory=no_rows)
    next_tokens: Int32 = field(default_factory=no_rows)
    kept: Int32 = field(default_factory=lambda: no_rows().reshape(0, 5))
    adapter_numbers: Int32 = field(default_factory=no_rows)
    cascade: bool = False

    @property
    def follows(self) -> bool:
        """Whether the device keeps the sequences' tokens."""
        return len(self.follow_rows) > 0

    @cached_property
    def verifies(self) -> bool:
        """Whether any sequence has drafts; then all rows are sampled."""
        return int(self.drafts.max(initial=0)) > 0

    @cached_property
    def masks_drafts(self) -> bool:
        """Whether any sequence with a mask has drafts: its masks depend on its StepDrafts."""
        return len(self.masked_rows) > 0 and self.verifies and bool((self.drafts[self.masked_rows] > 0).any())

    @cached_property
    def first_logits(self) -> Int32:
        """Row of the logits of each sequence's first new token [B]; rows of its drafts follow."""
        return self.query_start[:-1] if self.verifies else np.arange(self.num_sequences, dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.context_lens)

    @cached_property
    def uses_lora(self) -> bool:
        """Whether any token has an adapter."""
        return bool((self.adapter_index >= 0).any())


@dataclass(frozen=True)
class StepDrafts:
    """Drafts of a plan's sequences with masks (`masks_drafts`).

    tokens [M, K]  in the order of `masked_rows`; the plan has the number that counts. Empty if they could not be read
    """

    step: int
    tokens: Int32


@dataclass(frozen=True)
class StepMasks:
    """Allowed tokens of a step's rows. Sent after the plan, while the device computes the logits.

    rows [N]      sequences of the plan; those of `masked_rows` that have finished are left out
    places [N]    0: mask of the sequence's first new token, i: of the token after draft i, without gaps
    words [N, W]  a bit for each token, 32 per word, lowest bit first
    """

    step: int
    rows: Int32
    places: Int32
    words: Int32

    def drafts_left(self, plan: StepPlan) -> Int32:
        """Return how many drafts of each sequence may be accepted [B]: with masks, those followed by one."""
        left = plan.drafts.copy()
        left[plan.masked_rows] = 0
        np.maximum.at(left, self.rows, self.places)
        return left


class FileOrder(NamedTuple):
    """An order for the files of KV pages: "write" a page of host memory to its key's file, "read" it, or "delete_all".

    key, place   the page's key, and its place in host memory
    """

    action: Literal["write", "read", "delete_all"]
    key: bytes = b""
    place: int = -1


class PageCopies(NamedTuple):
    """Copies between KV pages on the device and in host memory, or an order for files.

    ticket   their number, in ascending order
    saves    (device page, host page), to make before the loads
    loads    (host page, device page); no step uses these pages of the device until the copies are reported
    source   memory of another engine that the loads read; "": this engine's
    keys     keys of the pages of the saves, if other engines read them, or of those of the loads from `source`
    erase    let no other engine read pages that were saved before
    """

    ticket: int
    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    source: str = ""
    keys: tuple[bytes, ...] = ()
    erase: bool = False
    file: FileOrder | None = None


@dataclass(frozen=True)
class StepResult:
    """Tokens that a step sampled.

    tokens [B]         -1: the logits are not finite; undefined outside `sample_rows`. [T] with drafts: a sequence gets
                       1 + accepted [B] of them from its first row on
    logprob_tokens, logprobs [B, 1 + k]   the chosen token, then the k likeliest; ranks [B]: of the chosen one
    prompt_*           the same for N scored prompt tokens
    sources [B]        source of the drafts; None: OWN_TOKENS for all
    compiled           number of kernels that were compiled to launch the step
    """

    step: int
    tokens: Int32
    logprob_tokens: Int32 | None = None
    logprobs: Float32 | None = None
    ranks: Int32 | None = None
    prompt_tokens: Int32 | None = None
    prompt_logprobs: Float32 | None = None
    prompt_ranks: Int32 | None = None
    accepted: Int32 | None = None
    sources: Int32 | None = None
    compiled: int = 0


SLOT_DAMAGED = "the adapter's copy on the device was damaged, and is loaded again; send the request again"
"""Error that `Runner.loaded` reports for a slot which no longer holds its adapter's bytes."""


class Runner(Protocol):
    """Executes plans in the order of `submit`, and loads adapters meanwhile, identified by their registry numbers.

    A scheduler without asynchronous loads uses `submit` and `collect` alone.
    """

    def submit(self, plan: StepPlan) -> Any:
        """Start a step and return a handle, without waiting for the device."""

    def drafts(self, handle: Any) -> StepDrafts:
        """Wait for the drafts of a submitted step with `masks_drafts`. They precede the step's logits."""

    def constrain(self, handle: Any, masks: StepMasks) -> None:
        """Send the masks of the last submitted step, so that it is sampled. Call it before the next `submit`."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a submitted step. Steps are collected in order."""

    def start_load(self, slot: int, number: int) -> None:
        """Start to load an adapter into a slot that no step in flight uses; slot -1: into host memory only."""

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """Return (slot, number, error or None) of loads that ended since the last call, and of slots that were found
        to be damaged. Wait up to `timeout` seconds for the first.
        """

    def forget_adapter(self, number: int) -> None:
        """Drop an unused adapter."""

    def copy_pages(self, copies: PageCopies) -> None:
        """Start copies between KV pages and host memory, after the submitted steps. Later steps that write a saved page
        wait for its copy.
        """

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """Return (ticket, error or None) of copies that ended since the last call. Wait up to `timeout` seconds for the
        first.
        """
