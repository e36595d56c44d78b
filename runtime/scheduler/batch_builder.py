"""Which sequences the next step computes, and how many tokens of each: under the budget, by priority, fairly, and as
pages, rows and adapters last.
"""

from collections import Counter
from heapq import heappop, heappush

from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from .drafting import Drafting
from .prompt_scores import tokens_within
from .rows import Work
from .sequence import Sequence, Status
from .states import States
from .step_plan import drafts_within
from .suspects import Suspects


class Choice:
    """Fills the `Work` of a step from what runs and waits.

    at               whom the choice is about: the one to blame if it raises
    uses_priorities  whether any sequence has had a priority
    holds_back       whether the last step left out a sequence whose last token must be known first
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self.drafting = Drafting(states.limits.step_times)
        self.suspects = Suspects()
        self.at: Sequence | None = None
        self.uses_priorities = False
        self.holds_back = False
        self._extra_logits = 0  # rows that the step has left for prompts whose log-probabilities are wanted
        self._crowded: tuple[Sequence, int] | None = None  # the first that found no room, and since which step

    def fill(self, work: Work, idle: bool) -> Work:
        """Fill `work` with what the step computes, which may be nothing; returns it.

        `idle`: no step is at work. While there are suspects, a step waits for that.
        """
        self._extra_logits = self.states.limits.extra_logits
        if not self.suspects:
            return self._choose(work, idle)
        return self._try_suspects(work) if idle else work

    def _choose(self, work: Work, idle: bool) -> Work:
        """Fill `work` when nobody is suspected."""
        states = self.states
        self._vacate_slot()
        if self.uses_priorities:
            self._make_way()
        self._share_room()
        preempted = self.holds_back = False
        budget = states.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        running = Status.RUNNING
        last = states.step - 1
        for sequence in list(states.running):  # the loop that decides what a step costs on the CPU
            known, in_flight, drafted = len(sequence.tokens), sequence.in_flight, sequence.drafted
            if known + in_flight + drafted >= sequence.limit or sequence.status is not running:
                self.holds_back |= drafted > 0
                continue
            # it waits for a step that is issued
            if in_flight and (sequence.sampled_at[0] != last or sequence.needs_history):
                self.holds_back = True
                continue
            left = known + in_flight - sequence.computed
            if left > 1:
                prompts.append(sequence)
                continue
            if sequence.computed + drafted >= len(sequence.pages) * PAGE_SIZE:
                self.at = sequence
                preempted |= self._next_page(sequence)
                if sequence.status is not running:
                    continue
            work.append((sequence, 1))
        budget -= len(work)
        kept = self._kept_for_others(prompts, budget)
        for sequence in _in_turn(prompts):
            if budget > kept and sequence.status is Status.RUNNING:
                budget -= self._assign(work, sequence, min(budget - kept, sequence.length - sequence.computed))
        self._admit(work, budget, preempted)
        if states.limits.follows:
            self._add_drafts(work, idle)
        return work

    def _add_drafts(self, work: Work, idle: bool) -> None:
        """Let a step of sequences that all decode compute drafts too; no page is taken from anybody for them."""
        states = self.states
        most = drafts_within(len(work), states.limits.max_num_batched_tokens)
        if not most or not all(sequence.followed for sequence, _ in work):
            return
        if not work or self.drafting.rests(len(work), work[-1][0].arrival):
            return
        # the last token that the limit allows needs no row
        entries = [
            (
                sequence.speculation,
                min(sequence.speculation.most, most, sequence.limit - 1 - sequence.most_tokens)
                if sequence.speculation is not None
                else 0,
            )
            for sequence, _ in work
        ]
        chosen = self.drafting.choose(entries, most, ahead=not idle)
        for index, (speculation, room) in enumerate(entries):
            if speculation is None:
                continue
            self.at = sequence = work[index][0]
            count = min(chosen, room) if speculation.adaptive else room
            if count <= 0:
                continue
            missing = pages_for(sequence.most_tokens + count) - len(sequence.pages)
            pages = states.pages.allocate(missing) if missing > 0 else None
            if pages is not None:
                sequence.pages += pages
                states.rows.set_pages(sequence, len(sequence.pages) - missing)
            count = min(count, len(sequence.pages) * PAGE_SIZE - sequence.most_tokens)
            work[index] = sequence, 1 + count

    def _try_suspects(self, work: Work) -> Work:
        """The same while there are suspects: a step of the group that is on trial."""
        states = self.states
        budget = states.limits.max_num_batched_tokens
        group = self.suspects.on_trial()
        states.residency.begin_pass(states.step)
        later: list[Sequence] = []
        crowded = False
        for sequence in group:
            self.at = sequence
            if sequence.status is Status.HELD:
                cached = states.prefix_cache.match(sequence)
                room = states.rows.num_free > 0 and states.fits(sequence, cached)
                if not room or not states.residency.ready(sequence.number):
                    later.append(sequence)
                    # a slot that comes free by itself is on its way; others are held by those that do not run now
                    crowded |= not room or not states.slots.is_loading(sequence.number)
                    continue
                states.start(sequence, cached)
            left = self.suspects.tokens_left(sequence)
            if budget > 0 and left > 0 and sequence.status is Status.RUNNING:
                budget -= self._assign(work, sequence, min(budget, left))
        if later and len(later) < len(group):
            self.suspects.put_off(later)
        elif crowded and states.running:
            states.preempt(states.running[-1])  # nobody of the group is running: another makes way
        return work if group else self._choose(work, idle=True)

    def take_back(self, work: Work) -> None:
        """A step that was not issued: nobody may count on what was announced of it."""
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
                states.preempt(sequence)

    def _assign(self, work: Work, sequence: Sequence, count: int) -> int:
        """Let the step compute so many tokens of a prompt, or fewer where all their logits are wanted; returns how
        many.
        """
        self.at = sequence
        if sequence.scores_prompt:
            count, extra = tokens_within(sequence, count, self._extra_logits)
            self._extra_logits -= extra
        work.append((sequence, count))
        sequence.chunked_at = self.states.step
        self.states.prefix_cache.publish(sequence, sequence.computed + count)
        return count

    def _next_page(self, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page; returns whether any sequence had to be preempted for it (perhaps
        itself).
        """
        states = self.states
        preempted = False
        while (pages := states.pages.allocate(1)) is None:
            victim = states.running[-1]  # never one that this step already serves, because those come before `sequence`
            states.preempt(victim)
            preempted = True
            if victim is sequence:
                return True
        sequence.pages += pages
        states.rows.set_pages(sequence, len(sequence.pages) - 1)
        return preempted

    def _vacate_slot(self) -> None:
        """Put back the sequences of an adapter whose slot another has waited for too long."""
        states = self.states
        number = states.residency.take_vacated(self._got_on)
        if number is not None:
            for sequence in [sequence for sequence in states.running if sequence.number == number]:
                states.preempt(sequence)

    def _got_on(self, number: int) -> bool:
        """Whether all running sequences of an adapter have sampled since they were admitted: no prompt is under way."""
        return all(
            sequence.in_flight or len(sequence.tokens) - sequence.computed <= 1
            for sequence in self.states.running
            if sequence.number == number
        )

    def _make_way(self) -> None:
        """Put back running sequences that keep one of higher priority waiting for a row or for pages."""
        states = self.states
        first = states.waiting.first() if states.running else None
        if first is None or first.in_flight or (first.number >= 0 and not states.slots.is_resident(first.number)):
            return
        while (
            states.running
            and states.running[-1].priority > first.priority
            and not (states.rows.num_free and states.fits(first, states.prefix_cache.match(first)))
        ):
            states.preempt(states.running[-1])

    def _share_room(self) -> None:
        """Put back sequences of the owner that runs the most for one of another that has found no room for too long."""
        states = self.states
        if self._crowded is None or states.step - self._crowded[1] < states.limits.owner_patience:
            return
        first, _ = self._crowded
        self._crowded = None
        if first.status is not Status.WAITING or first.in_flight:
            return
        runs = Counter(sequence.owner for sequence in states.running)
        while not (states.rows.num_free and states.fits(first, states.prefix_cache.match(first))):
            # after that it still runs as many: two owners do not take a row from each other for ever
            victims = [
                sequence
                for sequence in states.running
                if runs[sequence.owner] >= runs[first.owner] + 2 and sequence.priority >= first.priority
            ]
            if not victims:
                return
            victim = max(victims, key=lambda sequence: (runs[sequence.owner], sequence.order))
            runs[victim.owner] -= 1
            states.preempt(victim)

    def _kept_for_others(self, prompts: list[Sequence], budget: int) -> int:
        """How many tokens prompts under way leave to owners that wait and have none under way: at most half."""
        states = self.states
        if not prompts or states.waiting.num_owners < 2 or not states.rows.num_free:
            return 0
        busy = {sequence.owner for sequence in prompts}
        wanted = sum(
            head.length
            for head in states.waiting.heads()
            if head.owner not in busy
            and not head.in_flight
            and (head.number < 0 or states.slots.is_resident(head.number))
            and states.fits(head, [])
        )
        return min(budget // 2, wanted)

    def _note_crowded(self, sequence: Sequence | None) -> None:
        """Remember since when the first one that finds no room, or another of its owner, has found none."""
        if sequence is None:
            self._crowded = None
        elif self._crowded is None or self._crowded[0].owner != sequence.owner:
            self._crowded = sequence, self.states.step
        else:
            self._crowded = sequence, self._crowded[1]

    def _admit(self, work: Work, budget: int, preempted: bool) -> None:
        """Start waiting sequences as long as tokens, rows and pages last, and see to it that the adapters of the others
        come.

        Nothing is admitted in a step that had to preempt for pages.
        """
        states = self.states
        crowded: Sequence | None = None
        shared = states.waiting.num_owners > 1
        if shared and len(states.waiting):
            states.charge_running()
        turns = states.waiting.turns()
        if turns:
            states.residency.begin_pass(states.step)
        absent: set[int] = set()
        while turns:
            *_, key = heappop(turns)
            number = key[1]
            self.at = sequence = states.waiting.head(key)
            short = preempted or not states.rows.num_free
            # no further copy can be started: at most the first is looked for that could run if there were room
            if (short or budget <= 0) and not states.residency.wants_more:
                if crowded is not None or not (short and shared):
                    break
                if number >= 0 and not states.slots.is_resident(number):
                    continue
            if sequence is None or number in absent:
                continue
            if not states.residency.ready(number):
                absent.add(number)
                continue
            if short and crowded is None:
                crowded = sequence
            # in flight: preempted while its token is on the way
            if short or budget <= 0 or sequence.in_flight:
                continue
            cached = states.prefix_cache.match(sequence)
            if not states.fits(sequence, cached):
                preempted = True
                crowded = sequence
                continue
            states.waiting.pop(key)
            states.start(sequence, cached)
            budget -= self._assign(work, sequence, min(budget, sequence.length - sequence.computed))
            turn = states.waiting.turn(key)
            if turn is not None:
                heappush(turns, turn)
        self._note_crowded(crowded if shared else None)


def _in_turn(prompts: list[Sequence]) -> list[Sequence]:
    """Prompts under way, first those of the owner whose last chunk is the longest ago."""
    last: dict[str, int] = {}
    for sequence in prompts:
        last[sequence.owner] = max(last.get(sequence.owner, -1), sequence.chunked_at)
    if len(last) < 2:
        return prompts
    return sorted(prompts, key=lambda sequence: (sequence.priority, last[sequence.owner], sequence.order))
