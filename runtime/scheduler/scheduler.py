"""Continuous batching: which tokens of which sequences the next step computes. Pure CPU bookkeeping; no tensor, no
device.

A step first gives every decoding sequence its one token, then goes on with prompts that are under way, then admits
waiting sequences (by priority, fairly between owners and adapters: `waiting`), all under `max_num_batched_tokens` (long
prompts are cut into chunks). What the prefix cache holds of a prompt is not computed again. When pages run out, the
last running sequence (lowest priority, newest) is put back and computed again later (preemption by recompute): its
tokens are kept, so its output does not change. So it is when an owner finds no room for long (`choice`).

Adapters: at most `num_slots` are resident (`residency`). A request whose adapter finds no slot, or is on its way into
one, waits, and others pass it.

Plans may be made one step ahead: a token that the last plan samples is `in_flight` until `commit`, and the next plan
refers to it by its row in that plan. Pages that a plan in flight still writes may be handed to a later plan, because
plans run in order on one stream.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from ..api.errors import RequestError
from ..text.structured.mask_filling import MaskFiller, Memory
from .batch_builder import Choice
from .limits import SchedulerLimits, SchedulerStats
from .masks import MasksOfStep
from .prompt_scores import Scored, scored_by
from .rows import SequenceFault, Work, build_plan
from .sequence import Sequence, Status
from .states import States
from .step_plan import FORMER_ANSWERS, OWN_TOKENS, TRAINED_DRAFT, StepDrafts, StepMasks, StepPlan, StepResult
from .suspects import STEP_FAULT, Issued, what_is_lost

_log = logging.getLogger(__name__)
PLAN_FAULT = "a fault in the scheduler while this request was worked on; others are not affected"


NO_TOKEN = (
    "the model's output is not a number: its values, or those of the adapter, overflow; check the adapter's weights"
)


class Sampled(NamedTuple):
    """One sequence's new token; `row` is its row in the step's result, `following`: how many tokens of the same step
    come after it, which the sequence has already.
    """

    sequence: Sequence
    token: int
    row: int
    following: int = 0


class Scheduler:
    """Plans steps and takes their results in.

    adapter_numbers      name -> the number by which the runner knows the adapter (may change while the engine runs; a
                         number keeps its meaning)
    adapter_hashes       number -> hash of the adapter's content, which the prefix cache goes by
    asynchronous_loads   False: a plan says which adapters to copy before it runs. True: `take_loads` says what to copy
                         meanwhile, and `load_done` must be called for each when it is over
    clock                seconds, for deadlines; must never go back

    `states` knows where each sequence stands and what it holds, `choice` what a step computes.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        adapter_numbers: Mapping[str, int] | None = None,
        adapter_hashes: Mapping[int, str] | None = None,
        *,
        asynchronous_loads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.states = States(limits, adapter_hashes, asynchronous_loads)
        self.choice = Choice(self.states)
        self._times = self.choice.drafting.times
        self.adapter_numbers = {} if adapter_numbers is None else adapter_numbers
        self.clock = clock
        self.timeouts = self.drafted = self.accepted = self.history_drafted = self.history_accepted = 0
        self.trained_drafted = self.trained_accepted = 0
        self._issued: dict[int, Issued] = {}
        self._masked = -1  # the last step whose masks were made
        self._masks: MasksOfStep | None = None  # that are being made
        self._filler = MaskFiller()
        self._drafts: StepDrafts | None = None  # the last ones that the device told
        self._void: dict[int, set[Sequence]] = {}  # of issued steps: the sequences whose tokens will be wrong
        self._loads: list[tuple[int, int]] = []  # for the plan that is being made
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._ended: list[Sequence] = []
        self._scored: list[Scored] = []

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, alone: bool = False) -> None:
        """Queue a sequence; `alone`: it is suspected, and computed in steps of its own until it is beyond suspicion.

        Raises RequestError for one that can never run.
        """
        if sequence.adapter is not None:
            sequence.number = self._number(sequence.adapter)
        if not 0 < len(sequence.tokens) < sequence.limit <= self.limits.max_model_len:
            raise RequestError(
                f"a prompt of {len(sequence.tokens)} tokens leaves no room for output within "
                f"max_model_len={self.limits.max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )
        if not self.states.waiting.active(sequence.number):
            self.states.residency.requested(sequence.number)
        self.states.waiting.enter(sequence, queued=not alone)
        if alone:
            sequence.status = Status.HELD
            self.choice.suspects.try_alone(sequence)
        if sequence.deadline is not None:
            # mostly those of finished sequences
            if len(self._deadlines) > 64 + 2 * (len(self.states.running) + len(self.states.waiting)):
                self._deadlines = sorted(entry for entry in self._deadlines if not entry[-1].finished)
            heappush(self._deadlines, (sequence.deadline, sequence.arrival, sequence))
        self.choice.uses_priorities |= sequence.priority != 0

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
        """Sequences that wait to be admitted."""
        return len(self.states.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.states.running) or self.num_waiting > 0 or bool(self.choice.suspects)

    @property
    def holds_back(self) -> bool:
        """Whether the last plan left out a sequence whose last token must be known first."""
        return self.choice.holds_back

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence now (also to abort one): its pages, row and adapter slot come free for the next plan."""
        self.states.finish(sequence, reason, stop_reason)

    def take_ended(self) -> list[Sequence]:
        """Sequences that the scheduler itself has ended since the last call: their deadline passed, or their adapter
        could not be loaded.
        """
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> SchedulerStats:
        """Where things stand."""
        states = self.states
        slots, pages, cache = states.slots, states.pages, states.prefix_cache
        return SchedulerStats(
            running=len(states.running),
            waiting=len(states.waiting),
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
            drafted=self.drafted,
            accepted=self.accepted,
            history_drafted=self.history_drafted,
            history_accepted=self.history_accepted,
            trained_drafted=self.trained_drafted,
            trained_accepted=self.trained_accepted,
        )

    # -- adapters --------------------------------------------------------------------------------------------------

    @property
    def asynchronous_loads(self) -> bool:
        """Whether adapters are copied while steps run (see the class)."""
        return self.states.residency.asynchronous

    def take_loads(self) -> list[tuple[int, int]]:
        """(slot, adapter number) of copies to start now; slot -1: only bring it into host memory.

        To be called after `add` and `schedule`.
        """
        return self.states.residency.take_loads()

    def load_done(self, slot: int, number: int, problem: str | None = None) -> None:
        """A copy that `take_loads` asked for is complete, or could not be made: `problem` then ends every sequence that
        waits for the adapter (a later request tries again). Reports for slot -1 change nothing."""
        if slot < 0:
            return
        if problem is None:
            self.states.residency.arrived(number)
            return
        for sequence in [*self.states.waiting.of(number), *self.choice.suspects.held(number)]:
            self._end(sequence, "error", problem)
        self.states.residency.failed(number)

    def forget_device(self) -> None:
        """What is in the KV pages and adapter slots is about to be lost. No sequence is unfinished, and no adapter is
        on its way.
        """
        self.states.prefix_cache.reset()
        self.states.residency.forget_resident()
        self.states.rings.empty_all()

    def forget_adapter(self, number: int) -> None:
        """No request will use this adapter any more (it was removed, or its name has a new content); those that are
        here finish on it.
        """
        self.states.rings.empty(number)
        self.states.residency.retire(number)

    def take_retired(self) -> list[int]:
        """Forgotten adapters that nobody uses any more, since the last call: the runner can drop them."""
        retired = self.states.residency.take_retired()
        for number in retired:
            self.states.rings.empty(number, for_ever=True)
            if self.states.first_acceptances is not None:
                self.states.first_acceptances.forget(number)
        return retired

    # -- planning --------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an issued step is committed or an adapter has
        arrived (or at all).

        A fault of its own, or a request that leaves no token to sample, ends the sequence that it was about
        (`take_ended`), and the step is planned without it.
        Raises what nobody can be blamed for.
        """
        states = self.states
        while True:
            work: Work = []
            self.choice.at = None
            try:
                self._expire()
                if not self.choice.fill(work, idle=not self._issued):
                    return None
                self._loads += states.residency.loads_of_plan()
                rings = states.rings if self.limits.follows else None
                plan = build_plan(states.step, work, states.rows, self._loads, rings)
            except Exception as error:
                culprit = error.sequence if isinstance(error, SequenceFault) else self.choice.at
                if culprit is None or culprit.finished:
                    raise
                asked_for = isinstance(error.__cause__, RequestError)
                if not asked_for:
                    _log.exception("a fault while request %r was planned", culprit.request_id)
                self.choice.take_back(work)
                self._end(culprit, "error", str(error.__cause__) if asked_for else PLAN_FAULT)
                continue
            self._loads = []
            if self._times.known and self._issued and (plan.decode or plan.verifies):
                self._times.planned(states.step, len(work), int(plan.drafts.max(initial=0)))
            self._issued[states.step] = (plan, [sequence for sequence, _ in work])
            states.step += 1
            return plan

    def _expire(self) -> None:
        """End the sequences whose deadlines have passed."""
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
    def drafts_due(self) -> bool:
        """Whether the oldest step that has not come back has no masks before its drafts are told (`take_drafts`)."""
        step = next(iter(self._issued), self._masked)
        if step == self._masked or not self._issued[step][0].masks_drafts:
            return False
        return self._drafts is None or self._drafts.step != step

    def take_drafts(self, drafts: StepDrafts) -> None:
        """What the device drafted in an issued step; that of one that has failed meanwhile changes nothing."""
        self._drafts = drafts

    def begin_masks(self) -> None:
        """Have the masks of the oldest step that has not come back made by other threads, if it needs some and has none
        yet: the tokens that they depend on are known. To be called after `schedule`, `commit` and `fail_step`, before
        other work; `masks_due` waits for them.
        """
        step = next(iter(self._issued), self._masked)
        if self._masks is not None and self._masks.step != step:
            self._masks.drop()  # their step has failed
            self._masks = None
        if step == self._masked or self._masks is not None:
            return
        plan, sequences = self._issued[step]
        if len(plan.masked_rows):
            self._masks = MasksOfStep(plan, sequences, self._void.get(step, ()), self._end, self._filler)

    def place_masks(self, memory: Memory) -> None:
        """Have masks filled there from now on, where there is room."""
        self._filler.memory = memory

    def masks_due(self) -> StepMasks | None:
        """The masks of the oldest step that has not come back, if it needs some, has none yet, and no drafts are due.
        To be called after `schedule`, `take_drafts`, `commit` and `fail_step`.
        """
        self.begin_masks()
        making = self._masks
        if making is None or self.drafts_due:
            return None
        masks = making.finish(self._drafts if self._issued[making.step][0].masks_drafts else None)
        self._masks, self._masked = None, making.step  # not before: the wait may be interrupted
        return masks

    def close(self) -> None:
        """End the thread that has masks made. May be called twice."""
        self._filler.close()

    def _end(self, sequence: Sequence, reason: str, text: str | None) -> None:
        """End a sequence of the scheduler's own accord: `take_ended` tells of it."""
        self.states.finish(sequence, reason, text)
        self._ended.append(sequence)

    def issued(self, step: int) -> list[Sequence]:
        """The unfinished sequences of a step that was planned and has not come back."""
        return [sequence for sequence in self._issued[step][1] if not sequence.finished]

    # -- results ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Sampled]:
        """Take a step's tokens in, in the order in which steps were issued; ends sequences that met their
        end-of-sequence, a stop token or their limit, and (with an error) those that got no token.

        Tokens of sequences that ended meanwhile are dropped.
        """
        plan, sequences = self._issued.pop(result.step)
        if self._times.known:
            self._times.came(result.step, self.clock())
        void = self._void.pop(result.step, ())
        self.states.residency.committed = result.step
        for scored in scored_by(plan, sequences, result):
            if scored.sequence not in void:
                scored.sequence.scored += len(scored.ranks)
                self._scored.append(scored)
        tokens = result.tokens.tolist()
        progress: list[Sampled] = []
        finished = Status.FINISHED
        if plan.verifies:
            self._commit_drafts(plan, sequences, void, tokens, result, progress)
            return progress
        for row in plan.sample_rows.tolist():
            sequence, token = sequences[row], tokens[row]
            if sequence.status is finished or sequence in void:
                continue
            sequence.in_flight -= 1
            if token < 0:
                self._end(sequence, "error", NO_TOKEN)
                continue
            self._append(sequence, token)
            progress.append(Sampled(sequence, token, row))
        return progress

    def _append(self, sequence: Sequence, token: int) -> None:
        """One more token of a sequence, which may be its last."""
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
        progress: list[Sampled],
    ) -> None:
        """A step with drafts: of each sequence those that hold and one token more, as far as it goes on."""
        if result.accepted is None:
            raise RuntimeError(f"step {plan.step} had drafts, and its result does not say how many hold")
        first, drafts, accepted = plan.first_logits.tolist(), plan.drafts.tolist(), result.accepted.tolist()
        first_acceptances = self.states.first_acceptances
        sources = [OWN_TOKENS] * len(drafts) if result.sources is None else result.sources.tolist()
        for index in plan.sample_rows.tolist():
            sequence = sequences[index]
            if sequence.finished or sequence in void:
                continue
            sequence.in_flight -= 1
            sequence.drafted -= drafts[index]
            if sequence.status is Status.RUNNING:  # not put back meanwhile: their keys and values are there
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
            held = min(accepted[index], len(taken))
            self.drafted += drafts[index]
            self.accepted += held
            if sources[index] == FORMER_ANSWERS:
                self.history_drafted += drafts[index]
                self.history_accepted += held
            elif sources[index] == TRAINED_DRAFT:
                self.trained_drafted += drafts[index]
                self.trained_accepted += held
            if drafts[index] and sequence.speculation is not None:
                sequence.speculation.note(drafts[index], held, sources[index])
                if first_acceptances is not None and sequence.speculation.adaptive:
                    first_acceptances.note(sequence.number, drafts[index], held)
            progress += (
                Sampled(sequence, token, first[index] + place, len(taken) - 1 - place)
                for place, token in enumerate(taken)
            )

    def take_scored(self) -> list[Scored]:
        """What committed steps have scored of prompts since the last call."""
        scored, self._scored = self._scored, []
        return scored

    def _publish(self, sequence: Sequence) -> None:
        try:
            self.states.prefix_cache.publish(sequence, sequence.computed)
        except Exception:
            _log.exception("a fault while a page of request %r was published", sequence.request_id)
            self._end(sequence, "error", PLAN_FAULT)

    def fail_step(self, step: int, problem: str = STEP_FAULT) -> None:
        """A step that was issued has failed on the device: it has no tokens, and what it should have stored is not
        there.

        Its sequences, and those that were to read what it should have stored, are computed again: the step's own ones
        as `suspects`, until the one is found with which a step fails when it is alone. That one ends with finish_reason
        `error` (`take_ended`). To be called in place of `commit`.
        """
        failed = self._issued.pop(step)
        self._times.failed(step)
        void = self._void.pop(step, set())
        self.states.residency.committed = step
        self.states.rings.empty_all()
        lost, pages = what_is_lost(failed, list(self._issued.values()), self.states.running)
        self.states.pages.unpublish(pages)
        for later, (_, sequences) in self._issued.items():
            self._void.setdefault(later, set()).update(set(lost).intersection(sequences))
        plan, sequences = failed
        ends = plan.context_lens.tolist()
        accused = {
            sequence: min(ends[row], len(sequence.tokens))
            for row, sequence in enumerate(sequences)
            if sequence.status is Status.RUNNING and sequence not in void
        }
        for sequence in lost:
            sequence.in_flight = sequence.drafted = 0
            if sequence.status is Status.RUNNING:
                (self.states.hold if sequence in accused else self.states.preempt)(sequence)
        guilty = self.choice.suspects.accuse(accused) if accused else None
        if guilty is not None:
            self._end(guilty, "error", problem)
