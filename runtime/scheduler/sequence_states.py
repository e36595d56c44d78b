"""Resources of waiting, running, held and finished sequences: taken when one starts to run, released when it stops."""

import time
from bisect import insort
from collections.abc import Mapping

from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from .adapter_slots import AdapterResidency
from .answer_history import AnswerHistory
from .disk.disk_pages import DiskBackedPages
from .host_pages import HostPages
from .kv_cache import PageAllocator, PrefixCache
from .limits import SchedulerLimits
from .plan_builder import RowTable
from .sequence import Sequence, Status
from .speculation import AdapterAcceptance
from .transfer.leased_pages import LeasedPages
from .transfer.offered_pages import OfferedPages
from .waiting_queue import WaitingQueues


class SequenceStates:
    """The sequences and their KV pages, table rows, adapter slots and rings of former answers.

    running             sequences that compute, by priority, then arrival
    waiting             sequences to admit, by owner and adapter
    host                KV pages in host memory, and the sequences that wait for some; None: there are none
    step                number of the next plan
    preemptions         number of preempted sequences
    adapter_acceptance  expected draft acceptance of new sequences; None without step times
    """

    def __init__(
        self, limits: SchedulerLimits, adapter_hashes: Mapping[int, str] | None, asynchronous_loads: bool
    ) -> None:
        self.limits = limits
        self.pages = PageAllocator(limits.num_pages)
        self.prefix_cache = PrefixCache(
            self.pages, {} if adapter_hashes is None else adapter_hashes, limits.prefix_caching
        )
        self.host = self._host_pages()
        self.answers = AnswerHistory(limits.ring_tokens, self.prefix_cache.content_of)
        self.rows = RowTable(limits.max_num_seqs, pages_for(limits.max_model_len))
        self.waiting = WaitingQueues()
        self.residency = AdapterResidency(limits.num_slots, limits.slot_patience, asynchronous_loads, self.waiting)
        self.slots = self.residency.slots
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.adapter_acceptance = AdapterAcceptance() if limits.step_times else None
        self.step = 0

    def _host_pages(self) -> HostPages | None:
        limits = self.limits
        if limits.kv_role == "decode":
            return OfferedPages(self.pages)
        if not limits.host_pages:
            return None
        # pages of the largest step
        window = min(limits.host_pages, limits.max_num_batched_tokens // PAGE_SIZE + limits.max_num_seqs)
        if limits.kv_role == "prefill":
            return LeasedPages(limits.host_pages, self.pages, window)
        if limits.disk_pages:
            return DiskBackedPages(limits.host_pages, self.pages, window, limits.disk_prefix, limits.disk_pages)
        return HostPages(limits.host_pages, self.pages, window)

    @property
    def num_loading(self) -> int:
        """Number of sequences that wait for pages of their prefix; each gets a row afterwards."""
        return 0 if self.host is None else self.host.num_waiting

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence now (also to abort it): its pages, row and adapter slot are free for the next plan."""
        if sequence.finished:
            return
        waiting = sequence.status is Status.WAITING
        if sequence.status is Status.RUNNING:
            if sequence.prefill_only and reason == "length" and isinstance(self.host, LeasedPages):
                self.host.hold(sequence.request_id, self.prefix_cache.keys(sequence), sequence.pages)
            if sequence.on_device and reason != "error":
                self.answers.keep(sequence, int(self.rows.ring[sequence.row]))
            self.release(sequence)
        if sequence.status is Status.LOADING and self.host is not None:
            self.host.leave(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if self.waiting.leave(sequence, waiting):
            self.residency.note_unused(sequence.number)

    def start_load(self, sequence: Sequence, cached: list[int]) -> bool:
        """Let a sequence, which is not queued, wait for pages of its prefix in host memory; return False if there are
        none. `cached`: pages of the prefix on the device.
        """
        if self.host is None or not self.host.start_load(sequence, cached, self.prefix_cache.keys(sequence)):
            return False
        sequence.status = Status.LOADING
        return True

    def start(self, sequence: Sequence, cached: list[int], ahead: bool = False) -> None:
        """Let a sequence run; `cached`: pages that hold its prefix already. `ahead`: without its adapter's slot."""
        slot = -1
        if not ahead:
            slot, sequence.ahead = self.residency.admit(sequence.number), 0
        self.pages.share(cached)
        pages = self.pages.allocate(pages_for(sequence.length) - len(cached))
        if pages is None:
            raise RuntimeError(f"no pages for {sequence.length} tokens, although `fits` found some")
        sequence.status = Status.RUNNING
        sequence.started = sequence.started or time.time()
        sequence.pages = cached + pages
        sequence.computed = len(cached) * PAGE_SIZE
        sequence.published = len(cached)
        sequence.publish_at = sequence.computed + PAGE_SIZE
        if self.adapter_acceptance is not None and sequence.speculation is not None:
            self.adapter_acceptance.start(sequence.speculation, sequence.number)
        self.waiting.charge(sequence, sequence.computable - sequence.computed)
        sequence.charged = sequence.resumed = len(sequence.tokens)
        self.prefix_cache.count_hits(sequence)
        sequence.loads = sequence.pages_loaded = 0
        self.rows.claim(sequence, slot, self.answers.acquire(sequence))
        self.rows.set_pages(sequence, 0)
        insort(self.running, sequence, key=lambda other: other.order)

    def release(self, sequence: Sequence) -> None:
        """Stop a running sequence: free its pages and row, and remove it from its adapter's and ring's users."""
        has_slot = self.rows.adapter_slot[sequence.row] >= 0
        self.running.remove(sequence)
        self.pages.free(sequence.pages)
        sequence.pages = []
        sequence.on_device = False
        self.answers.release(int(self.rows.ring[sequence.row]))
        self.rows.release(sequence)
        self._charge(sequence)
        if has_slot:
            self.slots.release(sequence.number, self.step - 1)

    def charge_running(self) -> None:
        """Charge new tokens of running sequences to their shares; stopped sequences are charged by `release`."""
        for sequence in self.running:
            self._charge(sequence)

    def _charge(self, sequence: Sequence) -> None:
        self.waiting.charge(sequence, len(sequence.tokens) - sequence.charged)
        sequence.charged = len(sequence.tokens)

    def fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Return whether there are pages for a sequence, given its `cached` ones."""
        # running sequences need pages to grow; without a reserve they would preempt the new one at once
        reserve = self.limits.num_pages // 100 if self.running else 0
        if self.host is not None:
            reserve += self.host.reserved
        return pages_for(sequence.length) - len(cached) + self.pages.count_idle(cached) + reserve <= self.pages.num_free
