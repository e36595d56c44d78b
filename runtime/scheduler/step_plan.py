"""What one step computes: flat arrays that the scheduler makes and the runner reads, and what comes back.

Nothing in here refers to a tensor or a device, so that a plan can cross a process boundary.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

AHEAD = 3
"""Steps that may be with the device at once: the one that runs, the next one, and after steps of few tokens one
more.
"""


SCORED_ROWS = 128
"""Prompt tokens of which a step may give log-probabilities next to the rows that it samples."""


DRAFT_SIZES = (1, 3, 7)
"""Drafts a sequence for which there are programs; a step of other counts runs in the next larger one."""
VERIFIED_ROWS = 256
"""Query rows of a step with drafts, at most: from there on rows cost as much as steps."""


RINGS = 64
"""Adapter contents whose last answers the device keeps at a time."""


OWN_TOKENS, FORMER_ANSWERS, TRAINED_DRAFT = 0, 1, 2
"""Where a sequence's drafts came from."""


def drafts_within(sequences: int, budget: int) -> int:
    """The most drafts that each of so many sequences may have in a step of `budget` tokens."""
    rows = min(VERIFIED_ROWS, budget)
    return max((size for size in DRAFT_SIZES if sequences * (1 + size) <= rows), default=0)


def no_rows() -> Int32:
    """An empty array."""
    return np.zeros(0, np.int32)


def most_logits(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Rows of logits that a step may have: one a sequence, and those of prompts whose log-probabilities are wanted."""
    return min(max_num_seqs + SCORED_ROWS, max_num_batched_tokens)


@dataclass(frozen=True)
class SamplingPlan:
    """How the rows of a step are sampled; arrays are [B] unless said otherwise ([T] in a step with drafts, where every
    token's row is sampled; rows in the flat lists are rows of the logits).

    `greedy`: every sampled row has temperature 0. `num_logprobs`: likeliest tokens to report a row, -1 = none;
    `num_prompt_logprobs`: the same for the prompt tokens that are scored. The flat
    lists (rows, tokens, values) add `bias_values` to single logits (-inf bans a token); a row that `allowed_rows` names
    gets one of its `allowed_tokens`; `history_*` list each distinct
    token of a penalised row with the number of times that it occurs in the output (0 = in the prompt only), and the
    three penalties are per row. `steps`: tokens of output so far; in a plan that follows sequences this less the row's
    position, which the device adds.
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
    history_rows: Int32
    history_tokens: Int32
    history_counts: Int32
    presence_penalty: Float32
    frequency_penalty: Float32
    repetition_penalty: Float32


@dataclass(frozen=True)
class StepPlan:
    """One step: T query tokens of B sequences, grouped by sequence.

    step           number of the step
    decode         each sequence has exactly one query token
    input_ids [T]  a token whose id only the device knows yet holds 0
    positions, slot_mapping [T]; adapter_index [T] (-1 = base model)
    block_table [B, P], context_lens [B] (query tokens included), query_start [B + 1]
    logits_indices [R]  row of each sequence's last query token, then of other tokens that are scored
    scored_rows [N]     rows of the logits after which a prompt goes on with scored_tokens [N]: their log-probabilities
                        are wanted
    sample_rows [S]     sequences that get a new token (the others are in the midst of their prompt)
    feed_positions, feed_rows [F]  input_ids[feed_positions] = the last step's tokens[feed_rows], on the device
    masked_rows [M]     sampled sequences that need a mask: the step samples when its StepMasks have come
    follow_rows [B]     row of the device's history that each sequence has, -1 = none (its prompt goes on). Empty in an
                        engine without speculation
    drafts [B]          drafts that a sequence computes after its last token. Then input_ids, positions and slot_mapping
                        are the device's to fill in, and context_lens is the most that there may be; -1 = all is known
    told_rows, told_lengths [N], told_tokens   histories that begin: row, number of tokens, and all these tokens
    rings [B]           ring of former answers that each sequence may be drafted from, -1 = none; ring_ends, ring_filled
                        [B]: the place after the ring's newest token, and how many tokens up to there count
    next_tokens [B]     the token after each sequence's last query token, in the midst of its prompt; -1: it is sampled.
                        Empty as follow_rows is
    kept [N, 5]         answers that go into rings before anything else: row of the history, the first of its tokens
                        that is kept, the one after the last, ring, place in the ring
    slot_loads [L, 2]   (slot, adapter number) to copy into the stacks before the step; empty where adapters are copied
                        while steps run
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
    told_rows: Int32 = field(default_factory=no_rows)
    told_lengths: Int32 = field(default_factory=no_rows)
    told_tokens: Int32 = field(default_factory=no_rows)
    rings: Int32 = field(default_factory=no_rows)
    ring_ends: Int32 = field(default_factory=no_rows)
    ring_filled: Int32 = field(default_factory=no_rows)
    next_tokens: Int32 = field(default_factory=no_rows)
    kept: Int32 = field(default_factory=lambda: no_rows().reshape(0, 5))

    @property
    def follows(self) -> bool:
        """Whether the device keeps the sequences' tokens."""
        return len(self.follow_rows) > 0

    @cached_property
    def verifies(self) -> bool:
        """Whether any sequence has drafts: all rows are sampled."""
        return int(self.drafts.max(initial=0)) > 0

    @cached_property
    def masks_drafts(self) -> bool:
        """Whether any sequence that needs masks has drafts: its masks follow from its StepDrafts."""
        return len(self.masked_rows) > 0 and self.verifies and bool((self.drafts[self.masked_rows] > 0).any())

    @cached_property
    def first_logits(self) -> Int32:
        """Row of the logits from which each sequence gets its first token [B]; those after its drafts follow."""
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
    """What the device drafted for the sequences of a plan that need masks (`masks_drafts`): tokens [M, K], in the order
    of `masked_rows`; of each as many count as the plan says. Empty where they could not be read.
    """

    step: int
    tokens: Int32


@dataclass(frozen=True)
class StepMasks:
    """Which tokens a step's rows may get. It follows a plan with `masked_rows` as soon as the tokens before are known,
    while the device computes the step's logits.

    rows [N] (sequences of the plan; those of `masked_rows` that ended meanwhile are left out), places [N] (0: the mask
    of the sequence's first token, i: of the one after its i-th draft; a sequence has them up to its last one without a
    gap), words [N, W]: a bit for each token, 32 a word, lowest bit first
    """

    step: int
    rows: Int32
    places: Int32
    words: Int32

    def drafts_left(self, plan: StepPlan) -> Int32:
        """How many drafts of each sequence may hold [B]: those of constrained ones as far as there are masks for the
        tokens after them.
        """
        left = plan.drafts.copy()
        left[plan.masked_rows] = 0
        np.maximum.at(left, self.rows, self.places)
        return left


@dataclass(frozen=True)
class StepResult:
    """What a step sampled.

    tokens [B] (-1: the logits are no numbers; rows outside `sample_rows` are meaningless; [T] in a step with drafts, of
    which a sequence gets 1 + accepted [B] from its first one on); with logprobs: token ids and
    log-probabilities [B, 1 + k], the chosen token first, then the k likeliest, and the rank of the chosen one [B].
    `prompt_*`: the same for the N prompt tokens that were scored. `sources` [B]: where the drafts came from,
    OWN_TOKENS, FORMER_ANSWERS or TRAINED_DRAFT; None where there were own tokens only. `compiled`: the kernels that had
    to be compiled before the step could be launched.
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
