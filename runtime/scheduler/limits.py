"""Scheduler configuration and statistics."""

from dataclasses import dataclass
from typing import Literal

from ...ops.core.kv_layout import pages_for
from .speculation import DraftCounts
from .step_plan import most_logits

KvRole = Literal["", "prefill", "decode"]


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes and policies of one engine's scheduler.

    num_pages               KV pages
    max_model_len           most tokens of a sequence
    max_num_seqs            most running sequences
    max_num_batched_tokens  most query tokens of a step
    num_slots               adapter slots
    slot_patience           steps that a request waits for an adapter slot before another adapter's sequences are
                            preempted
    owner_patience          steps that a request waits for a row or pages before sequences of the owner with the most
                            running ones are preempted; its own owner must run at least two fewer
    speculation             drafts of requests that do not set it: "off" (also off for all others), "auto" or a number
    step_times              (sequences, rows per sequence, seconds) of timed programs, for "auto"
    speculation_history     tokens of former answers that the device keeps for each adapter content
    host_pages              KV pages in host memory
    disk_pages              most files of KV pages; 0: none are written
    disk_prefix             path of these files up to the pages' keys
    exact                   a step computes either prompts or sampled tokens
    cascade_tile            neighbouring sequences of a decode step whose common prefix attention can read once; 0: no
                            program does
    cascade_pages           fewest page reads that a step with cascade attention must save
    kv_role                 "prefill": other engines read its host pages; "decode": it reads those of others
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
    host_pages: int = 0
    disk_pages: int = 0
    disk_prefix: str = ""
    exact: bool = False
    cascade_tile: int = 0
    cascade_pages: int = 0
    kv_role: KvRole = ""

    @property
    def speculates(self) -> bool:
        """Whether sequences may have drafts; then the device keeps their tokens."""
        return self.speculation != "off"

    @property
    def ring_tokens(self) -> int:
        """Tokens of a ring buffer of former answers; 0: there are none."""
        return self.speculation_history if self.speculates else 0

    @property
    def extra_logits(self) -> int:
        """Most rows of logits of a step beyond one per sequence."""
        return most_logits(self.max_num_seqs, self.max_num_batched_tokens) - self.max_num_seqs

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                "so a step has no token for some running sequences; raise max_num_batched_tokens or lower max_num_seqs"
            )
        if self.num_pages < pages_for(self.max_model_len):
            raise ValueError(
                f"{self.num_pages} KV pages do not hold one sequence of max_model_len={self.max_model_len} tokens "
                f"({pages_for(self.max_model_len)} pages); lower max_model_len or give the KV cache more memory"
            )


@dataclass(kw_only=True)
class SchedulerStats(DraftCounts):
    """Current state, and (from `preemptions` on, and drafts) counts since the start. prefix_* count prompt tokens."""

    running: int
    waiting: int
    waiting_for_adapters: int
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
    slot_audit_failures: int
    host_pages: int = 0
    host_pages_used: int = 0
    host_pages_saved: int = 0
    host_pages_loaded: int = 0
    host_page_evictions: int = 0
    disk_pages: int = 0
    disk_pages_used: int = 0
    disk_pages_written: int = 0
    disk_pages_read: int = 0
    disk_pages_dropped: int = 0
    disk_pages_damaged: int = 0
    disk_failures: int = 0
    prefix_host_hits: int = 0
    cascade_steps: int = 0
    page_leases: int = 0
    pages_leased: int = 0
    page_leases_expired: int = 0
    page_loads_refused: int = 0
