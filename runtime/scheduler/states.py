"""Waiting, running, held, finished: what a sequence takes and gives back when it goes from one to another."""

from bisect import insort
from collections.abc import Mapping

from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from .answer_history import AnswerRings
from .kv_pages import PageAllocator
from .limits import SchedulerLimits
from .prefix_cache import PrefixCache
from .residency import Residency
from .rows import RowTable
from .sequence import Sequence, Status
from .speculation import FirstAcceptances
from .waiting import WaitingQueues


class States:
    """The sequences, and what they hold: KV pages, rows of the tables, adapter slots, rings of former answers.

    running      those that compute, by priority, then arrival
    waiting      those that are to be admitted, by owner and adapter
    step         the number of the next plan
    preemptions  how often a running sequence was put back
    first_acceptances  what sequences that begin are expected to accept of drafts; None where no step times are known
    """

    def __init__(
        self, limits: SchedulerLimits, adapter_hashes: Mapping[int, str] | None, asynchronous_loads: bool
    ) -> None:
        self.limits = limits
        self.pages = PageAllocator(limits.num_pages)
        self.prefix_cache = PrefixCache(
            self.pages, {} if adapter_hashes is None else adapter_hashes, limits.prefix_caching
        )
        self.rings = AnswerRings(limits.remembered, self.prefix_cache.content_of)
        self.rows = RowTable(limits.max_num_seqs, pages_for(limits.max_model_len))
        self.waiting = WaitingQueues()
        self.residency = Residency(limits.num_slots, limits.slot_patience, asynchronous_loads, self.waiting)
        self.slots = self.residency.slots
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.first_acceptances = FirstAcceptances() if limits.step_times else None
        self.step = 0

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence now (also to abort one): its pages, row and adapter slot come free for the next plan."""
        if sequence.finished:
            return
        waiting = sequence.status is Status.WAITING
        if sequence.status is Status.RUNNING:
            if sequence.followed and reason != "error":
                self.rings.keep(sequence, int(self.rows.ring[sequence.row]))
            self._withdraw(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if self.waiting.leave(sequence, waiting):
            self.residency.unused(sequence.number)

    def start(self, sequence: Sequence, cached: list[int]) -> None:
        """Let a sequence run; `cached`: the pages that hold its beginning already."""
        slot = self.residency.admitted(sequence.number)
        self.pages.share(cached)
        pages = self.pages.allocate(pages_for(sequence.length) - len(cached))
        if pages is None:
            raise RuntimeError(f"pages for {sequence.length} tokens vanished between two looks at them")
        sequence.status = Status.RUNNING
        sequence.pages = cached + pages
        sequence.computed = len(cached) * PAGE_SIZE
        sequence.published = len(cached)
        sequence.publish_at = sequence.computed + PAGE_SIZE
        if self.first_acceptances is not None and sequence.speculation is not None:
            self.first_acceptances.begin(sequence.speculation, sequence.number)
        self.waiting.charge(sequence, len(sequence.tokens) - sequence.computed)
        sequence.charged = len(sequence.tokens)
        self.prefix_cache.started(sequence)
        self.rows.claim(sequence, slot, self.rings.acquire(sequence))
        self.rows.set_pages(sequence, 0)
        insort(self.running, sequence, key=lambda other: other.order)

    def charge_running(self) -> None:
        """Bring the shares up to date, which else happens when a sequence stops running."""
        for sequence in self.running:
            self._charge(sequence)

    def _charge(self, sequence: Sequence) -> None:
        self.waiting.charge(sequence, len(sequence.tokens) - sequence.charged)
        sequence.charged = len(sequence.tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back: it is computed again later, its tokens are kept."""
        self._withdraw(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.push(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Put a running sequence aside: it is suspected, and `suspects` says when it is computed again."""
        self._withdraw(sequence)
        sequence.status = Status.HELD
        sequence.computed = 0
        sequence.preemptions += 1

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a running sequence's pages, row and adapter use away."""
        self.running.remove(sequence)
        self.pages.free(sequence.pages)
        sequence.pages = []
        sequence.followed = False
        self.rings.release(int(self.rows.ring[sequence.row]))
        self.rows.release(sequence)
        self._charge(sequence)
        if sequence.number >= 0:
            self.slots.release(sequence.number, self.step - 1)

    def fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether there are pages for a sequence of which some are `cached`."""
        # room for the running ones to grow, against preempting at once
        reserve = self.limits.num_pages // 100 if self.running else 0
        return pages_for(sequence.length) - len(cached) + self.pages.count_idle(cached) + reserve <= self.pages.num_free
