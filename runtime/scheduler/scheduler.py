"""Continuous batching: plans steps and commits their results, without a tensor or a device.

The batch of a step is built under `max_num_batched_tokens` (`batch_builder`). When KV pages or adapter slots run out,
sequences are preempted (`preemption`). Cached prefixes are not computed again (`kv_cache`). A request waits while its
adapter has no slot or is loading (`adapter_slots`), and others pass it.

Plans are made ahead: a token that an issued plan samples is `in_flight` until `commit`, and the next plan refers to it
by its row in that plan. Pages that a plan in flight writes may be given to a later plan, because plans run in order on
one stream.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from heapq import heappop, heappush
from typing import NamedTuple

from ...ops.core.kv_layout import PAGE_SIZE
from ..api.errors import RequestError
from ..text.structured.mask_filling import MaskFiller, Memory
from .batch_builder import BatchBuilder
from .cascade.shared_prefixes import SharedPrefixes
from .disk.disk_pages import DiskBackedPages
from .failed_steps import STEP_FAULT, IssuedStep, find_lost
from .limits import SchedulerLimits, SchedulerStats
from .plan_builder import SequenceFault, Work, build_plan
from .preemption import Preemption
from .prompt_logprobs import ScoredTokens, scored_tokens
from .sequence import Sequence, Status, find_activation
from .sequence_states import SequenceStates
from .speculation import DraftCounts
from .step_plan import OWN_TOKENS, SLOT_DAMAGED, PageCopies, StepDrafts, StepMasks, StepPlan, StepResult
from .token_masks import StepMaskBuilder

_log = logging.getLogger(__name__)
PLAN_FAULT = "the scheduler failed on this request; others are not affected"
NO_TOKEN = "the model's output is not finite: its values, or its adapter's, overflow; check the adapter's weights"


class SampledToken(NamedTuple):
    """One new token.

    row        its row in the step's result
    following  number of later tokens of the same step, which the sequence already holds
    """

    sequence: Sequence
    token: int
    row: int
    following: int = 0


class Scheduler:
    """Plans steps and commits their results.

    adapter_numbers      name -> adapter number; numbers are never reused, names may get new ones
    adapter_hashes       number -> hash of the adapter's content, for the prefix cache
    adapter_invocations  number -> token ids from whose last occurrence in a prompt on the adapter is active (aLoRA)
    asynchronous_loads   False: a plan has the adapters to load before it runs. True: `take_loads` returns the adapters
                         to load meanwhile, and `load_done` reports each
    clock                monotonic seconds, for deadlines
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        adapter_numbers: Mapping[str, int] | None = None,
        adapter_hashes: Mapping[int, str] | None = None,
        adapter_invocations: Mapping[int, tuple[int, ...]] | None = None,
        *,
        asynchronous_loads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.states = SequenceStates(limits, adapter_hashes, asynchronous_loads)
        self.preemption = Preemption(self.states)
        self.batch_builder = BatchBuilder(self.states, self.preemption)
        self._shared_prefixes = SharedPrefixes(limits, self.states.rows)
        self._times = self.batch_builder.draft_planner.times
        self.adapter_numbers = {} if adapter_numbers is None else adapter_numbers
        self.adapter_invocations = {} if adapter_invocations is None else adapter_invocations
        self.clock = clock
        self.timeouts = 0
        self.cascade_steps = 0
        self.draft_counts = DraftCounts()
        self._issued: dict[int, IssuedStep] = {}
        self._masked = -1  # last step with complete masks
        self._masks: StepMaskBuilder | None = None
        self._filler = MaskFiller()
        self._drafts: StepDrafts | None = None  # the last ones from the device
        self._void: dict[int, set[Sequence]] = {}  # issued step -> sequences with invalid tokens
        self._loads: list[tuple[int, int]] = []  # for the next plan
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._ended: list[Sequence] = []
        self._scored: list[ScoredTokens] = []

    def activation(self, adapter: str | None, prompt: list[int]) -> int:
        """Return the first token of a prompt that its adapter computes; -1: none, because its invocation is absent."""
        invocation = self.adapter_invocations.get(self.adapter_numbers.get(adapter or "", -1))
        return 0 if invocation is None else find_activation(prompt, invocation)

    def add(self, sequence: Sequence, alone: bool = False) -> None:
        """Queue a sequence. `alone`: it is suspected of a failed step, and gets steps of its own until it is cleared.

        Raises RequestError if it can never run.
        """
        if sequence.adapter is not None:
            number = self._number(sequence.adapter)
            sequence.number = number if sequence.active_from >= 0 else -1
        if not 0 < len(sequence.tokens) < sequence.limit <= self.limits.max_model_len:
            raise RequestError(
                f"a prompt of {len(sequence.tokens)} tokens leaves no room for output within "
                f"max_model_len={self.limits.max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )
        states = self.states
        if states.prefix_cache.enabled:
            # whole pages of the base, which others find too; the last token is always computed with the slot
            most = min(sequence.active_from, len(sequence.tokens) - 2, sequence.cacheable)
            sequence.ahead = max(0, most // PAGE_SIZE * PAGE_SIZE)
        if not states.waiting.active(sequence.number):
            states.residency.prefetch(sequence.number)
        states.waiting.enter(sequence, queued=not alone)
        if alone:
            sequence.status = Status.HELD
            self.batch_builder.suspects.add_alone(sequence)
        if sequence.deadline is not None:
            # most entries may be of finished sequences
            if len(self._deadlines) > 64 + 2 * (len(states.running) + len(states.waiting)):
                self._deadlines = sorted(entry for entry in self._deadlines if not entry[-1].finished)
            heappush(self._deadlines, (sequence.deadline, sequence.arrival, sequence))
        self.preemption.uses_priorities |= sequence.priority != 0

    def _number(self, name: str) -> int:
        if self.limits.num_slots == 0:
            raise RequestError(
                f"adapter={name!r} needs an adapter slot, but max_loras is 0; give LLM its adapters or raise max_loras"
            )
        number = self.adapter_numbers.get(name)
        if number is None:
            raise RequestError(f"adapter={name!r} is not known; load it first")
        return number

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self.states.waiting) + self.states.num_loading

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.states.running) or self.num_waiting > 0 or bool(self.batch_builder.suspects)

    @property
    def waits_for_results(self) -> bool:
        """Whether the last plan left out a sequence that needs its token in flight first."""
        return self.batch_builder.waits_for_results

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence now (also to abort it): its pages, row and adapter slot are free for the next plan."""
        self.states.finish(sequence, reason, stop_reason)

    def take_ended(self) -> list[Sequence]:
        """Return the sequences that the scheduler itself ended since the last call, for a deadline or an error."""
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> SchedulerStats:
        """Return the current statistics."""
        states = self.states
        slots, pages, cache, host = states.slots, states.pages, states.prefix_cache, states.host
        return SchedulerStats(
            running=len(states.running),
            waiting=self.num_waiting,
            waiting_for_adapters=states.waiting.count(lambda number: number >= 0 and number not in slots.resident),
            pages=pages.num_pages,
            pages_used=pages.num_used,
            pages_cached=pages.num_cached,
            adapters_resident=len(slots.resident),
            adapters_loading=slots.num_loading,
            preemptions=states.preemptions,
            timeouts=self.timeouts,
            prefix_queries=cache.queries,
            prefix_hits=cache.hits,
            page_evictions=pages.evictions,
            adapter_admissions=slots.admissions,
            adapter_loads=slots.loads,
            adapter_evictions=slots.evictions,
            adapter_failures=states.residency.failures,
            slot_audit_failures=states.residency.audit_failures,
            **({} if host is None else host.stats()),
            prefix_host_hits=cache.host_hits,
            cascade_steps=self.cascade_steps,
            **asdict(self.draft_counts),
        )

    @property
    def asynchronous_loads(self) -> bool:
        """Whether adapters are loaded while steps run (see the class)."""
        return self.states.residency.asynchronous

    @property
    def is_loading(self) -> bool:
        """Whether a load of an adapter or of KV pages is in flight."""
        host = self.states.host
        return self.states.slots.num_loading > 0 or (host is not None and host.is_loading)

    def take_loads(self) -> list[tuple[int, int]]:
        """Return (slot, adapter number) of loads to start now; slot -1: into host memory only.

        Call it after `add` and `schedule`.
        """
        return self.states.residency.take_loads()

    def load_done(self, slot: int, number: int, problem: str | None = None) -> None:
        """Report the end of a load from `take_loads`; slot -1 has no effect. `problem`: why it failed; all sequences
        that wait for the adapter end with it, and a later request tries again.
        """
        if slot < 0:
            return
        if problem == SLOT_DAMAGED:
            self._evict_damaged(slot, number)
            return
        if problem is None:
            self.states.residency.finish_load(number)
            return
        ahead = [sequence for sequence in self.states.running if sequence.ahead and sequence.number == number]
        for sequence in [*self.states.waiting.of(number), *self.batch_builder.suspects.held(number), *ahead]:
            self._end(sequence, "error", problem)
        self.states.residency.fail_load(number)

    def _evict_damaged(self, slot: int, number: int) -> None:
        """Free a damaged slot. Requests with output of it end, and no page or former answer of it is used again."""
        states = self.states
        content = states.prefix_cache.content_of(number)  # other names of the content share its pages
        suspects = self.batch_builder.suspects.held(number)
        begun = [each for each in (*states.waiting.of(number), *suspects) if len(each.tokens) > each.prompt_length]
        running = [each for each in states.running if states.prefix_cache.content_of(each.number) == content]
        for sequence in (*begun, *running):
            self._end(sequence, "error", SLOT_DAMAGED)
        states.pages.forget_idle()
        if states.host is not None:
            states.host.clear()
        states.answers.clear(number)
        states.residency.evict_damaged(slot, number)

    def take_copies(self) -> list[PageCopies]:
        """Return the copies between KV pages and host memory to start now, in order. Call it after `schedule`, and
        start them before the plan.
        """
        return [] if self.states.host is None else self.states.host.take_copies()

    def copies_done(self, ticket: int, problem: str | None = None) -> None:
        """Report the end of copies from `take_copies`. `problem`: why they failed; sequences then compute."""
        if self.states.host is None:
            return
        for sequence in self.states.host.finish(ticket, problem):
            sequence.status = Status.WAITING
            self.states.waiting.push(sequence)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page of all tiers; return False, without effect, while pages are in use."""
        if not self.states.prefix_cache.reset():
            return False
        if self.states.host is not None:
            self.states.host.clear()
        return True

    def load_with_plan(self, slot: int, number: int) -> None:
        """Load an adapter with the next plan, in place of one whose sequences it takes over."""
        self._loads.append((slot, number))

    def forget_device(self, keep_host_pages: bool = False) -> None:
        """Mark KV pages, adapter slots and former answers as empty before their memory is freed.

        Call it only without unfinished sequences, loads and copies.
        """
        if keep_host_pages:
            self.states.prefix_cache.reset()
        else:
            if isinstance(self.states.host, DiskBackedPages):
                self.states.host.close_files()
            self.reset_prefix_cache()
        self.states.residency.forget_resident()
        self.states.answers.clear_all()

    def forget_adapter(self, number: int) -> None:
        """Retire a removed or replaced adapter: unfinished requests still use it, new requests cannot."""
        self.states.answers.clear(number)
        self.states.residency.retire(number)

    def take_retired(self) -> list[int]:
        """Return the retired adapters that have become unused since the last call: the runner can drop them."""
        retired = self.states.residency.take_retired()
        for number in retired:
            self.states.answers.clear(number, forget=True)
            if self.states.adapter_acceptance is not None:
                self.states.adapter_acceptance.forget(number)
        return retired

    def schedule(self) -> StepPlan | None:
        """Return the next step. Returns None if there is no work, or it first needs a commit or the end of a load.

        An exception while a sequence is handled ends that sequence (`take_ended`), and the step is planned without it.
        Other exceptions are raised.
        """
        states, builder = self.states, self.batch_builder
        if states.host is not None:
            states.host.step, states.host.oldest_step = states.step, next(iter(self._issued), states.step)
            states.host.save_ahead()
        while True:
            work: Work = []
            builder.current = None
            try:
                self.expire()
                if not builder.fill(work, idle=not self._issued):
                    return None
                # a slot of `load_with_plan` may have another adapter by now
                loads = [load for load in self._loads if states.slots.holds(*load)]
                self._loads = loads + states.residency.loads_of_plan()
                answers = states.answers if self.limits.speculates else None
                cascade = self._shared_prefixes.group(work)
                plan = build_plan(states.step, work, states.rows, self._loads, answers, cascade)
            except Exception as error:
                culprit = error.sequence if isinstance(error, SequenceFault) else builder.current
                if culprit is None or culprit.finished:
                    raise
                is_refusal = isinstance(error.__cause__, RequestError)
                if not is_refusal:
                    _log.exception("the scheduler failed on request %r", culprit.request_id)
                builder.undo(work)
                self._end(culprit, "error", str(error.__cause__) if is_refusal else PLAN_FAULT)
                continue
            self._loads = []
            if self._times.available and self._issued and (plan.decode or plan.verifies):
                self._times.plan(states.step, len(work), int(plan.drafts.max(initial=0)))
            self._issued[states.step] = (plan, [sequence for sequence, _ in work])
            states.step += 1
            self.cascade_steps += plan.cascade
            return plan

    def expire(self) -> None:
        """End sequences after their deadlines."""
        if not self._deadlines:
            return
        now = self.clock()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][-1].finished):
            _, _, sequence = heappop(self._deadlines)
            if not sequence.finished:
                self._end(
                    sequence,
                    "timeout",
                    f"the request's deadline passed after {len(sequence.output_ids)} tokens; allow it more time",
                )
                self.timeouts += 1

    @property
    def _oldest(self) -> int:
        """Oldest step in flight; without one, the last masked step."""
        return next(iter(self._issued), self._masked)

    @property
    def drafts_due(self) -> bool:
        """Whether the oldest step in flight needs its drafts (`take_drafts`) before its masks can be built."""
        step = self._oldest
        if step == self._masked or not self._issued[step][0].masks_drafts:
            return False
        return self._drafts is None or self._drafts.step != step

    def take_drafts(self, drafts: StepDrafts) -> None:
        """Take the drafts of an issued step; those of a failed step have no effect."""
        self._drafts = drafts

    def begin_masks(self) -> None:
        """Start to fill the masks of the oldest step in flight in other threads, if it needs some.

        Call it after `schedule`, `commit` and `fail_step`, before other work. `masks_due` waits for the masks.
        """
        step = self._oldest
        if self._masks is not None and self._masks.step != step:
            self._masks.cancel()  # their step has failed
            self._masks = None
        if step == self._masked or self._masks is not None:
            return
        plan, sequences = self._issued[step]
        if len(plan.masked_rows):
            self._masks = StepMaskBuilder(plan, sequences, self._void.get(step, ()), self._end, self._filler)

    def place_masks(self, memory: Memory) -> None:
        """Fill masks in this memory from now on while it has space."""
        self._filler.memory = memory

    def masks_due(self) -> StepMasks | None:
        """Return the masks of the oldest step in flight, once; None if it needs none or its drafts first.

        Call it after `schedule`, `take_drafts`, `commit` and `fail_step`.
        """
        self.begin_masks()
        builder = self._masks
        if builder is None or self.drafts_due:
            return None
        masks = builder.finish(self._drafts if self._issued[builder.step][0].masks_drafts else None)
        self._masks, self._masked = None, builder.step  # not earlier: the wait may be interrupted
        return masks

    def close(self) -> None:
        """End the threads that fill masks. May be called twice."""
        self._filler.close()

    def _end(self, sequence: Sequence, reason: str, text: str | None) -> None:
        """End a sequence for the scheduler's own reasons, and report it by `take_ended`."""
        self.states.finish(sequence, reason, text)
        self._ended.append(sequence)

    def issued(self, step: int) -> list[Sequence]:
        """Return the unfinished sequences of a step in flight."""
        return [sequence for sequence in self._issued[step][1] if not sequence.finished]

    def commit(self, result: StepResult) -> list[SampledToken]:
        """Add a step's tokens to their sequences, in the order of issue. End sequences at an end-of-sequence or stop
        token, at their limit, and (with an error) without a token. Tokens of finished sequences are dropped.
        """
        plan, sequences = self._issued.pop(result.step)
        if self._times.available:
            self._times.commit(result.step, self.clock())
        void = self._void.pop(result.step, ())
        self.states.residency.committed = result.step
        for scored in scored_tokens(plan, sequences, result):
            if scored.sequence not in void:
                scored.sequence.scored += len(scored.ranks)
                self._scored.append(scored)
        tokens = result.tokens.tolist()
        if plan.verifies:
            return self._commit_drafts(plan, sequences, void, tokens, result)
        progress: list[SampledToken] = []
        finished = Status.FINISHED
        for row in plan.sample_rows.tolist():
            sequence, token = sequences[row], tokens[row]
            if sequence.status is finished or sequence in void:
                continue
            sequence.in_flight -= 1
            if token < 0:
                self._end(sequence, "error", NO_TOKEN)
                continue
            self._append(sequence, token)
            progress.append(SampledToken(sequence, token, row))
        return progress

    def _append(self, sequence: Sequence, token: int) -> None:
        """Append a token, and end the sequence if it is the last one."""
        states = self.states
        sequence.tokens.append(token)
        if sequence.counts is not None:
            sequence.counts[token] += 1
        if sequence.computed >= sequence.publish_at and sequence.pages:
            self._publish(sequence)
        if token in sequence.eos_ids:
            states.finish(sequence, "stop")
        elif token in sequence.stop_ids:
            states.finish(sequence, "stop", token)
        elif len(sequence.tokens) >= sequence.limit:
            states.finish(sequence, "length")

    def _commit_drafts(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        void: Collection[Sequence],
        tokens: list[int],
        result: StepResult,
    ) -> list[SampledToken]:
        """Add the accepted drafts of each sequence and one more token, up to its end."""
        if result.accepted is None:
            raise RuntimeError(f"step {plan.step} had drafts, but its result has no `accepted`")
        first, drafts, accepted = plan.first_logits.tolist(), plan.drafts.tolist(), result.accepted.tolist()
        adapter_acceptance = self.states.adapter_acceptance
        sources = [OWN_TOKENS] * len(drafts) if result.sources is None else result.sources.tolist()
        progress: list[SampledToken] = []
        for index in plan.sample_rows.tolist():
            sequence = sequences[index]
            if sequence.finished or sequence in void:
                continue
            sequence.in_flight -= 1
            sequence.drafted -= drafts[index]
            if sequence.status is Status.RUNNING:  # not preempted since: the drafts' keys and values are stored
                sequence.computed += accepted[index]
            taken: list[int] = []
            for token in tokens[first[index] : first[index] + 1 + accepted[index]]:
                if token < 0:
                    self._end(sequence, "error", NO_TOKEN)
                else:
                    self._append(sequence, token)
                    taken.append(token)
                if sequence.finished:
                    break
            used = min(accepted[index], len(taken))
            sequence.note_accepted(plan.step, used)
            self.draft_counts.add(drafts[index], used, sources[index])
            if drafts[index] and sequence.speculation is not None:
                sequence.speculation.add(drafts[index], used, sources[index])
                if adapter_acceptance is not None and sequence.speculation.adaptive:
                    adapter_acceptance.add(sequence.number, drafts[index], used)
            progress += (
                SampledToken(sequence, token, first[index] + place, len(taken) - 1 - place)
                for place, token in enumerate(taken)
            )
        return progress

    def take_scored(self) -> list[ScoredTokens]:
        """Return the prompt tokens that committed steps have scored since the last call."""
        scored, self._scored = self._scored, []
        return scored

    def _publish(self, sequence: Sequence) -> None:
        try:
            self.states.prefix_cache.publish(sequence, sequence.computed)
        except Exception:
            _log.exception("could not publish a page of request %r", sequence.request_id)
            self._end(sequence, "error", PLAN_FAULT)

    def fail_step(self, step: int, problem: str = STEP_FAULT) -> None:
        """Recover from an issued step that failed on the device. Call it in place of `commit`.

        Its sequences, and those that were to read keys and values from it, are computed again: its own ones as
        suspects, until a step with only one of them fails. That one ends with finish_reason `error` (`take_ended`).
        """
        failed = self._issued.pop(step)
        self._times.fail(step)
        void = self._void.pop(step, set())
        self.states.residency.committed = step
        self.states.answers.clear_all()
        lost, pages = find_lost(failed, list(self._issued.values()), self.states.running)
        self.states.pages.unpublish(pages)
        if self.states.host is not None:
            self.states.host.forget_since(step)
        self._loads = [*map(tuple, failed[0].slot_loads.tolist()), *self._loads]  # they may not have run
        for later, (_, sequences) in self._issued.items():
            self._void.setdefault(later, set()).update(set(lost).intersection(sequences))
        plan, sequences = failed
        ends = plan.context_lens.tolist()
        suspected = {
            sequence: min(ends[row], len(sequence.tokens))
            for row, sequence in enumerate(sequences)
            if sequence.status is Status.RUNNING and sequence not in void
        }
        for sequence in lost:
            sequence.in_flight = sequence.drafted = 0
            if sequence.status is Status.RUNNING:
                (self.preemption.hold if sequence in suspected else self.preemption.preempt)(sequence)
        faulty = self.batch_builder.suspects.add(suspected) if suspected else None
        if faulty is not None:
            self._end(faulty, "error", problem)
