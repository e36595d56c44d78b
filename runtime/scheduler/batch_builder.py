"""Batch of the next step: its sequences and the number of tokens of each, under the budget for tokens, rows and pages.

Decoding sequences get one token each, then running prompts continue, then waiting sequences are admitted. Prompts that
exceed the budget are cut into chunks.
"""

from heapq import heappop, heappush

from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from .failed_steps import Suspects
from .plan_builder import Work
from .preemption import Preemption
from .prompt_logprobs import limit_chunk
from .sequence import Sequence, Status
from .sequence_states import SequenceStates
from .speculation import DraftPlanner
from .step_plan import drafts_within


class BatchBuilder:
    """Fills the `Work` of a step with running and waiting sequences.

    current            the sequence being handled, which is to blame for an exception
    waits_for_results  the last step left out a sequence that needs its token in flight first
    """

    def __init__(self, states: SequenceStates, preemption: Preemption) -> None:
        self.states = states
        self.preemption = preemption
        self.draft_planner = DraftPlanner(states.limits.step_times)
        self.suspects = Suspects()
        self.current: Sequence | None = None
        self.waits_for_results = False
        self._decoded = False  # the last step of an exact engine had sampled tokens
        self._extra_logits = 0  # rows of logits that the step has left for prompt log-probabilities

    def fill(self, work: Work, idle: bool) -> Work:
        """Fill `work`, perhaps with nothing, and return it.

        `idle`: no step is in flight. While there are suspects, a step is built only then.
        """
        self._extra_logits = self.states.limits.extra_logits
        if self.suspects:
            return self._fill_with_suspects(work) if idle else work
        return self._fill(work, idle)

    def _fill(self, work: Work, idle: bool) -> Work:
        """Fill `work`; in an exact engine with given tokens or with sampled ones, in turn if there are both."""
        if not self.states.limits.exact:
            return self._fill_kind(work, idle)
        kind = "given" if self._decoded else "sampled"
        other = "sampled" if kind == "given" else "given"
        return self._fill_kind(work, idle, kind) or self._fill_kind(work, idle, other)

    def _fill_kind(self, work: Work, idle: bool, kind: str = "") -> Work:
        """Fill `work` with all kinds of tokens, or with only "given" or "sampled" ones."""
        states = self.states
        self.preemption.make_room()
        preempted = self.waits_for_results = False
        budget = states.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        running = Status.RUNNING
        last_step = states.step - 1
        for sequence in list(states.running):  # hot loop: most of a step's CPU time
            known, in_flight, drafted = len(sequence.tokens), sequence.in_flight, sequence.drafted
            if known + in_flight + drafted >= sequence.limit or sequence.status is not running:
                self.waits_for_results |= drafted > 0
                continue
            if in_flight and (sequence.sampled_at[0] != last_step or sequence.needs_history):
                self.waits_for_results = True
                continue
            if sequence.given_left if kind else known + in_flight - sequence.computed > 1:
                if kind == "sampled":
                    continue
                if sequence.ahead and sequence.computed >= sequence.ahead:
                    self.preemption.await_slot(sequence)
                else:
                    prompts.append(sequence)
                continue
            if kind == "given":
                continue
            if sequence.computed + drafted >= len(sequence.pages) * PAGE_SIZE:
                self.current = sequence
                preempted |= self.preemption.allocate_page(sequence)
                if sequence.status is not running:
                    continue
            work.append((sequence, 1))
        budget = 0 if kind == "sampled" else budget - len(work)
        reserved = self._reserved_for_others(prompts, budget)
        for sequence in _by_owner(prompts):
            if budget > reserved and sequence.status is Status.RUNNING:
                budget -= self._add_chunk(work, sequence, min(budget - reserved, sequence.chunk_left))
        self._admit(work, budget, preempted)
        self._decoded = kind == "sampled"
        if states.limits.speculates:
            self._add_drafts(work, idle)
        return work

    def _add_drafts(self, work: Work, idle: bool) -> None:
        """Add drafts if all sequences decode. Drafts use free pages only."""
        states, planner = self.states, self.draft_planner
        limit = drafts_within(len(work), states.limits.max_num_batched_tokens)
        if not limit or not all(sequence.on_device for sequence, _ in work):
            return
        if not work or planner.skips(len(work), work[-1][0].arrival):
            return
        # the last token within `sequence.limit` needs no row
        entries = [
            (
                sequence.speculation,
                min(sequence.speculation.max_drafts, limit, sequence.limit - 1 - sequence.max_length)
                if sequence.speculation is not None
                else 0,
            )
            for sequence, _ in work
        ]
        chosen = planner.choose(entries, limit, ahead=not idle)
        for index, (speculation, most) in enumerate(entries):
            if speculation is None:
                continue
            self.current = sequence = work[index][0]
            count = min(chosen, most) if speculation.adaptive else most
            if count <= 0:
                continue
            missing = pages_for(sequence.max_length + count) - len(sequence.pages)
            pages = states.pages.allocate(missing) if missing > 0 else None
            if pages is not None:
                sequence.pages += pages
                states.rows.set_pages(sequence, len(sequence.pages) - missing)
            count = min(count, len(sequence.pages) * PAGE_SIZE - sequence.max_length)
            work[index] = sequence, 1 + count

    def _fill_with_suspects(self, work: Work) -> Work:
        """Fill `work` with the first group of suspects; without unfinished ones, as usual."""
        states = self.states
        budget = states.limits.max_num_batched_tokens
        group = self.suspects.current_group()
        states.residency.start_pass(states.step)
        deferred: list[Sequence] = []
        blocked = False
        for sequence in group:
            self.current = sequence
            if sequence.status is Status.HELD:
                cached = states.prefix_cache.match(sequence)
                fits = states.rows.num_free > 0 and states.fits(sequence, cached)
                if not fits or not states.residency.ready(sequence.number):
                    deferred.append(sequence)
                    # while no load is under way, the slots belong to sequences that do not run now
                    blocked |= not fits or not states.slots.is_loading(sequence.number)
                    continue
                states.start(sequence, cached)
            left = self.suspects.tokens_left(sequence)
            if sequence.sampled:
                kind = bool(sequence.given_left)
                other_kind = bool(work) and kind != bool(work[0][0].given_left)
                left = 0 if other_kind else min(left, sequence.given_left or 1)
            if budget > 0 and left > 0 and sequence.status is Status.RUNNING:
                budget -= self._add_chunk(work, sequence, min(budget, left))
        if deferred and len(deferred) < len(group):
            self.suspects.defer(deferred)
        elif blocked and states.running:
            self.preemption.preempt(states.running[-1])
        return work if group else self._fill(work, idle=True)

    def undo(self, work: Work) -> None:
        """Undo a step that is not issued: unpublish its pages and preempt other sequences that share them."""
        states = self.states
        writers: dict[int, Sequence] = {}
        for sequence, count in work:
            first = sequence.computed // PAGE_SIZE
            writers |= dict.fromkeys(sequence.pages[first : (sequence.computed + count) // PAGE_SIZE], sequence)
            sequence.published = min(sequence.published, first)
            sequence.publish_at = (sequence.published + 1) * PAGE_SIZE
        states.pages.unpublish(writers)
        for sequence in list(states.running):
            if any(writers.get(page, sequence) is not sequence for page in sequence.pages):
                self.preemption.preempt(sequence)

    def _add_chunk(self, work: Work, sequence: Sequence, count: int) -> int:
        """Add up to `count` tokens of a prompt, fewer if rows of logits for all of them run out; return the number."""
        self.current = sequence
        if sequence.scores_prompt:
            count, extra = limit_chunk(sequence, count, self._extra_logits)
            self._extra_logits -= extra
        work.append((sequence, count))
        sequence.chunked_at = self.states.step
        self.states.prefix_cache.publish(sequence, sequence.computed + count)
        return count

    def _reserved_for_others(self, prompts: list[Sequence], budget: int) -> int:
        """Return the tokens that running prompts leave to waiting owners without a running prompt: at most half."""
        states = self.states
        if not prompts or states.waiting.num_owners < 2 or not states.rows.num_free:
            return 0
        owners = {sequence.owner for sequence in prompts}
        wanted = sum(
            head.length
            for head in states.waiting.heads()
            if head.owner not in owners
            and not head.in_flight
            and (head.number < 0 or states.slots.is_resident(head.number))
            and states.fits(head, [])
        )
        return min(budget // 2, wanted)

    def _admit(self, work: Work, budget: int, preempted: bool) -> None:
        """Start waiting sequences while tokens, rows and pages last, and load the adapters of others.

        Without its adapter's slot a sequence computes the pages before its activation, which are the base model's.
        Nothing is admitted in a step that had to preempt for pages.
        """
        states = self.states
        blocked: Sequence | None = None
        shared = states.waiting.num_owners > 1
        if shared and len(states.waiting):
            states.charge_running()
        due = states.residency.start_pass(states.step) if len(states.waiting) else None
        turns = states.waiting.turns(due)
        absent: set[int] = set()
        while turns:
            *_, key = heappop(turns)
            number = key[1]
            self.current = sequence = states.waiting.head(key)
            full = preempted or states.rows.num_free <= states.num_loading
            # without further loads only the first sequence that could run with more room is searched
            if (full or budget <= 0) and not states.residency.can_load:
                if blocked is not None or not (full and shared):
                    break
                if number >= 0 and not states.slots.is_resident(number):
                    continue
            if sequence is None:
                continue
            if number not in absent and not states.residency.ready(number):
                absent.add(number)
            ahead = number in absent
            if ahead and (full or not sequence.ahead):
                continue
            if full and blocked is None:
                blocked = sequence
            # in flight: it was preempted before its token returned
            if full or budget <= 0 or sequence.in_flight:
                continue
            cached = states.prefix_cache.match(sequence)
            if ahead and len(cached) * PAGE_SIZE >= sequence.ahead:
                sequence.ahead = 0
            if ahead and not (sequence.ahead and states.fits(sequence, cached)):
                continue
            if not states.fits(sequence, cached):
                preempted = True
                blocked = sequence
                continue
            states.waiting.pop(key)
            if not states.start_load(sequence, cached):
                states.start(sequence, cached, ahead)
                if sequence.chunk_left:
                    budget -= self._add_chunk(work, sequence, min(budget, sequence.chunk_left))
            turn = states.waiting.turn(key)
            if turn is not None:
                heappush(turns, turn)
        self.preemption.note_blocked(blocked if shared else None)


def _by_owner(prompts: list[Sequence]) -> list[Sequence]:
    """Return running prompts, those of the owner with the least recent chunk first."""
    last: dict[str, int] = {}
    for sequence in prompts:
        last[sequence.owner] = max(last.get(sequence.owner, -1), sequence.chunked_at)
    if len(last) < 2:
        return prompts
    return sorted(prompts, key=lambda sequence: (sequence.priority, last[sequence.owner], sequence.order))
