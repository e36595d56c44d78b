"""The loop between scheduler and runner, and the outputs of its requests. Needs neither torch nor a device."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...ops.core.kv_layout import PAGE_SIZE
from ..api.errors import RequestError
from ..api.outputs import FinishReason, RequestMetrics, RequestOutput
from ..api.request import Continuation, Delta, Request
from ..api.sampling_params import SEED_LIMIT, SamplingParams
from ..scheduler.logit_edits import BadWords
from ..scheduler.prompt_logprobs import positions_to_score
from ..scheduler.scheduler import SampledToken, Scheduler
from ..scheduler.sequence import NO_POSITIONS, Sequence, Status
from ..scheduler.speculation import DraftCounts, Speculation, make_speculation, max_drafts
from ..scheduler.step_plan import Runner, StepMasks, StepPlan, StepResult
from ..text.tokenizer import Tokenizer
from .adapter_switch import AdapterSwitches
from .completion_state import CompletionState

_log = logging.getLogger(__name__)
WAIT_FOR_LOADS = 0.01  # seconds between checks of deadlines and new requests
FAULT = "the engine failed on this request; others are not affected"
NO_OUTPUT = Continuation([])
Progress = tuple[list[Delta], list[RequestOutput]]
"""New output of streaming requests, and finished requests."""


@dataclass
class _OpenRequest:
    request: Request
    completions: list[CompletionState]
    open: set[int]  # unfinished completions
    stream: bool
    arrival_time: float  # this and the next: seconds since the epoch
    first_token_time: float | None = None


class Engine:
    """Runs requests to their end.

    overlap       plan step n + 1 while the device computes step n; results are then committed one step later
    eos_ids       tokens that end a text unless ignore_eos
    num_sampled   number of sampled tokens
    num_compiled  number of kernels that steps had to compile
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_ids: Iterable[int] = (),
        seed: int = 0,
        overlap: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.switches = AdapterSwitches(scheduler)
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self._depth = 1 if overlap else 0
        self._in_flight: deque[Any] = deque()
        self._requests: dict[str, _OpenRequest] = {}
        self._arrivals = 0
        self.num_sampled = 0
        self.num_compiled = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return bool(self._requests) or bool(self._in_flight)

    def add(self, request: Request, stream: bool = False, alone: bool = False) -> None:
        """Queue a request. Raises RequestError, and queues nothing, if it can never run.

        stream  decode token by token, as a continued request needs
        alone   the request may have caused a hang: run it alone until all its present tokens are computed
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id={request.request_id!r} is in use; choose another")
        params, limits = request.params, self.scheduler.limits
        ids = request.prompt_ids
        if request.prefill_only:  # all full pages, and a token that a decode engine computes in any case
            ids = ids[: (len(ids) - 1) // PAGE_SIZE * PAGE_SIZE + 1]
        prompt_length = len(ids)
        room = limits.max_model_len - prompt_length
        limit = prompt_length + (room if params.max_tokens is None else min(params.max_tokens, room))
        deadline = None if request.timeout is None else self.scheduler.clock() + request.timeout
        bad_words = BadWords(request.bad_words) if request.bad_words else None
        active_from = self._activation(request)
        scores, completions = NO_POSITIONS, []
        if params.prompt_logprobs is not None:
            scores = positions_to_score(request.scored, prompt_length)
        for index in range(params.n):
            earlier = request.continues[index] if request.continues else NO_OUTPUT
            sequence = Sequence(
                arrival=self._arrivals + index,
                request_id=request.request_id,
                index=index,
                tokens=[*ids, *earlier.token_ids],
                prompt_length=prompt_length,
                limit=limit,
                params=params,
                seed=self._seed(params, index),
                stop_ids=frozenset(params.stop_ids),
                eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
                adapter=request.adapter,
                active_from=active_from,
                priority=request.priority,
                owner=request.owner,
                deadline=deadline,
                # once per prompt: for the first completion, and not again for a continued one
                score_positions=scores if index == 0 and not earlier.token_ids else NO_POSITIONS,
                bad_words=bad_words,
                matcher=None if request.grammar is None else request.grammar.matcher(),
                speculation=self._speculation(params),
                sampled=(*request.scored, (prompt_length, limit)) if limits.exact else (),
                offer=request.offer,
                prefill_only=request.prefill_only,
            )
            completion = CompletionState(sequence, self.tokenizer, stream)
            if earlier.finished:
                sequence.status = Status.FINISHED
            elif earlier.token_ids:
                completion.resume(earlier.characters)
            completions.append(completion)
        running = [completion.sequence for completion in completions if not completion.sequence.finished]
        for sequence in running:
            self.scheduler.add(sequence, alone)
        self._arrivals += params.n
        unfinished = {sequence.index for sequence in running}
        self._requests[request.request_id] = _OpenRequest(request, completions, unfinished, stream, time.time())
        self._start_loads()

    def unfinished(self) -> list[tuple[Request, bool]]:
        """Return every open request in a form that another engine can run, and whether it streams.

        A streaming request continues its delivered output; other requests start again.
        """
        return [(self._resumable(open_request), open_request.stream) for open_request in self._requests.values()]

    def _resumable(self, open_request: _OpenRequest) -> Request:
        completions = open_request.completions
        continues: tuple[Continuation, ...] = ()
        if open_request.stream and any(completion.sequence.output_ids for completion in completions):
            continues = tuple(
                Continuation(list(each.sequence.output_ids), each.shown, each.sequence.finished) for each in completions
            )
        deadline = completions[0].sequence.deadline
        left = None if deadline is None else max(deadline - self.scheduler.clock(), 1e-3)
        return replace(open_request.request, timeout=left, continues=continues)

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown ids, such as of a request that just finished, are ignored."""
        open_request = self._requests.pop(request_id, None)
        for completion in open_request.completions if open_request else ():
            self.scheduler.finish(completion.sequence, "abort")

    def step(self) -> Progress:
        """Advance by one step."""
        self.take_loads_in()
        plan = self.plan()  # while masks are filled
        self._send_masks()
        if plan is not None:
            self._in_flight.append(self.runner.submit(plan))
            self._send_masks()
        deltas, finished = self.take_ended()
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            result = self.runner.collect(self._in_flight.popleft())
            progress = self.commit(result)
            self.begin_masks()
            new_deltas, new_finished = self.deliver(progress, result)
            deltas, finished = deltas + new_deltas, finished + new_finished
        elif plan is None and self.scheduler.has_work:  # every sequence waits for an adapter that is loading
            self.take_loads_in(WAIT_FOR_LOADS)
        return deltas, finished

    def _send_masks(self) -> None:
        """Send the masks of the oldest step if it waits for them, so that it is sampled and the next one can start."""
        if not self._in_flight:
            return
        if self.scheduler.drafts_due:
            self.begin_masks()
            self.scheduler.take_drafts(self.runner.drafts(self._in_flight[0]))
        masks = self.masks_due()
        if masks is not None:
            self.runner.constrain(self._in_flight[0], masks)

    def begin_masks(self) -> None:
        """See `Scheduler.begin_masks`."""
        self.scheduler.begin_masks()

    def masks_due(self) -> StepMasks | None:
        """See `Scheduler.masks_due`."""
        return self.scheduler.masks_due()

    def close(self) -> None:
        """End the engine's threads. May be called twice."""
        self.scheduler.close()

    def plan(self) -> StepPlan | None:
        """Return the next step and start the loads of its adapters."""
        self.switches.apply()
        plan = self.scheduler.schedule()
        self.start_copies()
        self._start_loads()
        return plan

    def start_copies(self) -> None:
        """Start the copies of KV pages that are due."""
        for copies in self.scheduler.take_copies():
            self.runner.copy_pages(copies)

    def _start_loads(self) -> None:
        if self.scheduler.asynchronous_loads:
            for slot, number in self.scheduler.take_loads():
                self.runner.start_load(slot, number)
            for number in self.scheduler.take_retired():
                self.switches.forget(number)
                self.runner.forget_adapter(number)

    def take_loads_in(self, timeout: float = 0.0) -> None:
        """Report finished loads of adapters and KV pages to the scheduler. Wait up to `timeout` seconds for the first:
        one of KV pages while some are loading.
        """
        if self.scheduler.states.host is not None:
            wait = timeout if self.scheduler.states.num_loading else 0.0
            for ticket, problem in self.runner.copied(wait):
                self.scheduler.copies_done(ticket, problem)
            timeout -= wait
        if self.scheduler.asynchronous_loads:
            for slot, number, problem in self.runner.loaded(timeout):
                self.scheduler.load_done(slot, number, problem)

    def forget_device(self, keep_host_pages: bool = False) -> None:
        """Mark all KV pages and adapter slots as empty before their memory is freed. Waits for running loads.

        Call it only without open requests.
        """
        self._start_loads()
        while self.scheduler.is_loading:
            self.take_loads_in(WAIT_FOR_LOADS)
        self.scheduler.forget_device(keep_host_pages)

    def take_ended(self) -> Progress:
        """Return the output of sequences that the scheduler itself ended, for a deadline or an error."""
        deltas: list[Delta] = []
        finished: list[RequestOutput] = []
        for sequence in self.scheduler.take_ended():
            open_request = self._requests.get(sequence.request_id)
            if open_request is None or sequence.index not in open_request.open:
                continue
            open_request.open.discard(sequence.index)
            completion = open_request.completions[sequence.index]
            completion.close()
            if open_request.stream:
                reason: FinishReason | None = sequence.finish_reason  # type: ignore[assignment]
                text = completion.new_text()
                deltas.append(Delta(sequence.request_id, sequence.index, text, [], reason, sequence.stop_reason))
            self._close_if_done(open_request, finished)
        return deltas, finished

    def _close_if_done(self, open_request: _OpenRequest, finished: list[RequestOutput]) -> None:
        if not open_request.open:
            del self._requests[open_request.request.request_id]
            finished.append(_output(open_request))

    def commit(self, result: StepResult) -> list[SampledToken]:
        """Commit the tokens of a step, which the next plan needs. `deliver` does the remaining work."""
        progress = self.scheduler.commit(result)
        self.num_sampled += len(progress)
        self.num_compiled += result.compiled
        return progress

    def deliver(self, progress: list[SampledToken], result: StepResult) -> Progress:
        """Decode text, find stop strings and build outputs of a committed step.

        An exception ends the request in which it occurs (finish_reason `error`), and no other.
        """
        deltas = self._prompt_logprobs()
        finished: list[RequestOutput] = []
        for sampled in progress:
            sequence = sampled.sequence
            open_request = self._requests.get(sequence.request_id)
            # ended since, by the scheduler or by an error of another completion
            if open_request is None or sequence.index not in open_request.open:
                continue
            if open_request.first_token_time is None:
                open_request.first_token_time = time.time()
            completion = open_request.completions[sequence.index]
            try:
                if completion.plain and (sampled.following or sequence.finish_reason is None):
                    text = completion.extend(sampled.token)
                    deltas.append(Delta(sequence.request_id, sequence.index, text, [sampled.token]))
                    continue
                delta = self._advance(open_request, sampled, result)
            except Exception:
                _log.exception("the engine failed on request %r", sequence.request_id)
                delta = self._fail(open_request, sequence)
            if delta is not None:
                deltas.append(delta)
            self._close_if_done(open_request, finished)
        return deltas, finished

    def _prompt_logprobs(self) -> list[Delta]:
        deltas = []
        for scored in self.scheduler.take_scored():
            sequence = scored.sequence
            open_request = self._requests.get(sequence.request_id)
            if open_request is not None:
                entries = open_request.completions[sequence.index].prompt_entries(scored)
                deltas.append(Delta(sequence.request_id, sequence.index, "", [], prompt_logprobs=entries))
        return deltas

    def _advance(self, open_request: _OpenRequest, sampled: SampledToken, result: StepResult) -> Delta | None:
        sequence = sampled.sequence
        completion = open_request.completions[sequence.index]
        stop = completion.accept(sampled.token, sampled.row, result, sampled.following > 0)
        if stop is not None:
            if sampled.following:  # drop drafts that were accepted after the stop string
                del sequence.tokens[-sampled.following :]
            if sequence.finished:  # by its length limit, with the token that completes the stop string
                sequence.finish_reason, sequence.stop_reason = "stop", stop
            else:
                self.scheduler.finish(sequence, "stop", stop)
        delta: Delta | None = None
        ended = sequence.finished and (stop is not None or not sampled.following)
        if open_request.stream:
            reason: FinishReason | None = sequence.finish_reason if ended else None  # type: ignore[assignment]
            delta = Delta(
                sequence.request_id,
                sequence.index,
                completion.new_text(),
                [sampled.token],
                reason,
                sequence.stop_reason if ended else None,
                *completion.last_logprobs(),
                versions=sequence.versions if ended and sequence.versions else None,
            )
        if ended:
            open_request.open.discard(sequence.index)
        return delta

    def _fail(self, open_request: _OpenRequest, sequence: Sequence) -> Delta | None:
        """End a request after an exception."""
        for completion in open_request.completions:
            if not completion.sequence.finished:
                self.scheduler.finish(completion.sequence, "error", FAULT)
        sequence.finish_reason, sequence.stop_reason = "error", FAULT
        open_request.open.clear()
        return Delta(sequence.request_id, sequence.index, "", [], "error", FAULT) if open_request.stream else None

    def _activation(self, request: Request) -> int:
        """Return the first token that the request's adapter computes, see `Scheduler.activation`.

        Raises RequestError if answers in the prompt were sampled with different activations.
        """
        adapter, ids, scored = request.adapter, request.prompt_ids, request.scored
        if not scored:
            return self.scheduler.activation(adapter, ids[: request.given])
        begin, end = scored[-1]
        first = self.scheduler.activation(adapter, ids[: scored[0][0]])
        # a scored token is perhaps sampled after the prompt, as its only choice
        if first != self.scheduler.activation(adapter, ids[:begin] if end == len(ids) else ids):
            raise RequestError(
                f"the invocation of adapter {adapter!r} occurs again after token {scored[0][0]}, where scored tokens "
                "begin, so that their answers do not share keys and values; score each answer in a request of its own"
            )
        return first

    def _speculation(self, params: SamplingParams) -> Speculation | None:
        """Return the request's speculation. Raises RequestError if the engine was started without it."""
        option = self.scheduler.limits.speculation
        if params.speculation not in (None, "off") and option == "off":
            raise RequestError(
                f"speculation={params.speculation!r} needs an engine that was started with speculation; leave it out"
            )
        return make_speculation(option if params.speculation is None else params.speculation, max_drafts(option))

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Return a completion's seed: the caller's plus its index, else a hash of the engine's seed and the arrival
        number.
        """
        if params.seed is not None:
            return (params.seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        mixed = (self.seed * 0x9E3779B97F4A7C15 + self._arrivals + index + 1) & (2 * SEED_LIMIT - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & (2 * SEED_LIMIT - 1)
        return (mixed ^ (mixed >> 31)) - SEED_LIMIT


def _output(open_request: _OpenRequest) -> RequestOutput:
    request, completions = open_request.request, open_request.completions
    speculations = [each.sequence.speculation for each in completions]
    started = min((each.sequence.started for each in completions if each.sequence.started), default=None)
    drafts = DraftCounts.total(each.counts for each in speculations if each is not None)
    return RequestOutput(
        request.request_id,
        request.prompt,
        list(request.prompt_ids),
        [completion.output() for completion in completions],
        True,
        request.adapter,
        completions[0].sequence.cached_tokens,
        RequestMetrics(open_request.arrival_time, open_request.first_token_time, time.time(), started),
        num_draft_tokens=drafts.drafted,
        num_accepted_tokens=drafts.accepted,
        num_history_draft_tokens=drafts.history_drafted,
        num_history_accepted_tokens=drafts.history_accepted,
        num_trained_draft_tokens=drafts.trained_drafted,
        num_trained_accepted_tokens=drafts.trained_accepted,
        num_preemptions=sum(each.sequence.preemptions for each in completions),
        adapter_active=completions[0].sequence.active_from >= 0,
    )
