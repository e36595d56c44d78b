"""What a scheduler is told of its engine, and what it tells about itself."""

from dataclasses import dataclass

from ...ops.core.kv_layout import pages_for
from .step_plan import most_logits


@dataclass(frozen=True)
class SchedulerLimits:
    """The engine's sizes: KV pages, tokens of a sequence, sequences at once, query tokens of a step, adapter slots.

    slot_patience: after so many steps a request whose adapter finds every slot in use has the sequences of another
    adapter put back.
    owner_patience: after so many steps a request that finds no row or pages has sequences put back of the owner that
    runs the most, if its own owner runs at least two fewer.
    speculation: drafts of a request that does not say: "off" (and none for any), "auto", or so many.
    speculation_history: tokens of former answers that the device keeps for each adapter's content, to draft from.
    step_times: (sequences, rows a sequence, seconds) of the programs that were timed, which "auto" goes by.
    """

    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_slots: int = 0
    prefix_caching: bool = True
    slot_patience: int = 128
    owner_patience: int = 32
    speculation: str | int = "off"
    step_times: tuple[tuple[int, int, float], ...] = ()
    speculation_history: int = 0

    @property
    def follows(self) -> bool:
        """Whether the device keeps the sequences' tokens."""
        return self.speculation != "off"

    @property
    def remembered(self) -> int:
        """Tokens of a ring of former answers; 0: there are none."""
        return self.speculation_history if self.follows else 0

    @property
    def extra_logits(self) -> int:
        """Rows of logits that a step may have beyond one a sequence."""
        return most_logits(self.max_num_seqs, self.max_num_batched_tokens) - self.max_num_seqs

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                "so not every running sequence would get its token in a step; raise the one or lower the other"
            )
        if self.num_pages < pages_for(self.max_model_len):
            raise ValueError(
                f"{self.num_pages} KV pages do not hold one sequence of max_model_len={self.max_model_len} tokens "
                f"({pages_for(self.max_model_len)} pages); lower max_model_len or give the KV cache more memory"
            )


@dataclass(frozen=True)
class SchedulerStats:
    """Where things stand now, and (from `preemptions` on) counts since the start; prefix_* count prompt tokens,
    cached ones are those found in the cache; `drafted`: drafts that were computed, `accepted`: those that became
    output, `history_*` and `trained_*`: of both those that came from former answers and from a trained draft.
    """

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_cached: int
    adapters_resident: int
    adapters_loading: int
    preemptions: int
    timeouts: int
    prefix_queries: int
    prefix_hits: int
    page_evictions: int
    adapter_admissions: int
    adapter_loads: int
    adapter_evictions: int
    adapter_failures: int
    drafted: int
    accepted: int
    history_drafted: int
    history_accepted: int
    trained_drafted: int
    trained_accepted: int
