"""The loop between scheduler and runner, and what becomes of the tokens. Knows neither torch nor a device."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..api.errors import RequestError
from ..api.outputs import FinishReason, RequestMetrics, RequestOutput
from ..api.request import Continuation, Delta, Request
from ..api.sampling_params import SEED_LIMIT, SamplingParams
from ..scheduler.forbidden import Forbidden
from ..scheduler.runner_protocol import Runner
from ..scheduler.scheduler import Sampled, Scheduler
from ..scheduler.sequence import Sequence, Status
from ..scheduler.speculation import Speculation, most_drafts, speculation_of
from ..scheduler.step_plan import StepMasks, StepPlan, StepResult
from ..text.tokenizer import Tokenizer
from .completion import Completion

_log = logging.getLogger(__name__)
WAIT_FOR_LOADS = 0.01  # seconds; deadlines and new requests are looked at in between
FAULT = "a fault in the engine; the request alone is affected"
NOTHING = Continuation([])


@dataclass
class _Live:
    request: Request
    completions: list[Completion]
    open: set[int]  # completions that are not finished
    stream: bool
    arrival_time: float  # this and the next: seconds since the epoch
    first_token_time: float | None = None


class Engine:
    """Runs requests to their end.

    `overlap`: plan step n + 1 while the device computes step n (results are then taken in one step late); without a
    device there is nothing to overlap. `eos_ids` end a text unless ignore_eos. `num_sampled` counts the tokens made so
    far, `num_compiled` the kernels that steps had to compile.
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
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self._depth = 1 if overlap else 0
        self._in_flight: deque[Any] = deque()
        self._live: dict[str, _Live] = {}
        self._arrivals = 0
        self.num_sampled = 0
        self.num_compiled = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return bool(self._live) or bool(self._in_flight)

    def add(self, request: Request, stream: bool = False, alone: bool = False) -> None:
        """Queue a request.

        Raises RequestError (and queues nothing) if it can never run; `stream` makes its text token by token, which one
        that continues another needs. `alone`: it is suspected of a step that did not return, and has steps of its own
        until it is beyond suspicion.
        """
        if request.request_id in self._live:
            raise RequestError(f"request_id={request.request_id!r} is in use; choose another")
        params, limits = request.params, self.scheduler.limits
        prompt_length = len(request.prompt_ids)
        room = limits.max_model_len - prompt_length
        limit = prompt_length + (room if params.max_tokens is None else min(params.max_tokens, room))
        deadline = None if request.timeout is None else self.scheduler.clock() + request.timeout
        forbidden = Forbidden(request.bad_words) if request.bad_words else None
        completions = []
        for index in range(params.n):
            so_far = request.continues[index] if request.continues else NOTHING
            sequence = Sequence(
                arrival=self._arrivals + index,
                request_id=request.request_id,
                index=index,
                tokens=[*request.prompt_ids, *so_far.token_ids],
                prompt_length=prompt_length,
                limit=limit,
                params=params,
                seed=self._seed(params, index),
                stop_ids=frozenset(params.stop_ids),
                eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
                adapter=request.adapter,
                priority=request.priority,
                owner=request.owner,
                deadline=deadline,
                # of several completions the first does it, and one that goes on has been scored before
                scores_prompt=params.prompt_logprobs is not None and index == 0 and not so_far.token_ids,
                forbidden=forbidden,
                matcher=None if request.grammar is None else request.grammar.matcher(),
                speculation=self._speculation(params),
            )
            completion = Completion(sequence, self.tokenizer, stream)
            if so_far.finished:
                sequence.status = Status.FINISHED
            elif so_far.token_ids:
                completion.resume(so_far.characters)
            completions.append(completion)
        running = [completion.sequence for completion in completions if not completion.sequence.finished]
        for sequence in running:
            self.scheduler.add(sequence, alone)
        self._arrivals += params.n
        unfinished = {sequence.index for sequence in running}
        self._live[request.request_id] = _Live(request, completions, unfinished, stream, time.time())
        self._start_loads()

    def unfinished(self) -> list[tuple[Request, bool]]:
        """Every request as it may be asked of another engine now, and whether it streams. One that streams continues
        what was delivered of it; another begins again.
        """
        return [(self._again(live), live.stream) for live in self._live.values()]

    def _again(self, live: _Live) -> Request:
        continues: tuple[Continuation, ...] = ()
        if live.stream and any(completion.sequence.output_ids for completion in live.completions):
            continues = tuple(
                Continuation(list(each.sequence.output_ids), each.shown, each.sequence.finished)
                for each in live.completions
            )
        deadline = live.completions[0].sequence.deadline
        left = None if deadline is None else max(deadline - self.scheduler.clock(), 1e-3)
        return replace(live.request, timeout=left, continues=continues)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids (it may just have finished) are ignored."""
        live = self._live.pop(request_id, None)
        for completion in live.completions if live else ():
            self.scheduler.finish(completion.sequence, "abort")

    def step(self) -> tuple[list[Delta], list[RequestOutput]]:
        """Advance by one step: what was added to requests that stream, and the requests that finished."""
        self.take_loads_in()
        plan = self.plan()  # while masks are made
        self._constrain()
        if plan is not None:
            self._in_flight.append(self.runner.submit(plan))
            self._constrain()
        deltas, finished = self.take_ended()
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            result = self.runner.collect(self._in_flight.popleft())
            progress = self.commit(result)
            self.begin_masks()
            more, others = self.deliver(progress, result)
            deltas, finished = deltas + more, finished + others
        elif plan is None and self.scheduler.has_work:  # everything waits for an adapter on its way
            self.take_loads_in(WAIT_FOR_LOADS)
        return deltas, finished

    def _constrain(self) -> None:
        """Have the oldest step sampled if it waits for masks: the forward of the next one can follow at once."""
        if not self._in_flight:
            return
        if self.scheduler.drafts_due:
            self.begin_masks()
            self.scheduler.take_drafts(self.runner.drafts(self._in_flight[0]))
        masks = self.masks_due()
        if masks is not None:
            self.runner.constrain(self._in_flight[0], masks)

    def begin_masks(self) -> None:
        """Have masks made while the caller goes on; see `Scheduler.begin_masks`."""
        self.scheduler.begin_masks()

    def masks_due(self) -> StepMasks | None:
        """The masks that the oldest issued step waits for, once; see `Scheduler.masks_due`."""
        return self.scheduler.masks_due()

    def close(self) -> None:
        """End the engine's threads. May be called twice."""
        self.scheduler.close()

    def plan(self) -> StepPlan | None:
        """The next step; the copies of adapters that go with it are started."""
        plan = self.scheduler.schedule()
        self._start_loads()
        return plan

    def _start_loads(self) -> None:
        if self.scheduler.asynchronous_loads:
            for slot, number in self.scheduler.take_loads():
                self.runner.start_load(slot, number)
            for number in self.scheduler.take_retired():
                self.runner.forget_adapter(number)

    def take_loads_in(self, timeout: float = 0.0) -> None:
        """Tell the scheduler which adapters have arrived; waits up to `timeout` seconds for the first."""
        if self.scheduler.asynchronous_loads:
            for slot, number, problem in self.runner.loaded(timeout):
                self.scheduler.load_done(slot, number, problem)

    def forget_device(self) -> None:
        """What is in the KV pages and adapter slots is about to be lost: waits for adapters on their way, and forgets
        what lies where. No request may be under way.
        """
        self._start_loads()
        while self.scheduler.states.slots.num_loading:
            self.take_loads_in(WAIT_FOR_LOADS)
        self.scheduler.forget_device()

    def take_ended(self) -> tuple[list[Delta], list[RequestOutput]]:
        """Deltas and outputs of what the scheduler ended by itself: deadlines that passed, adapters that could not
        be loaded.
        """
        deltas: list[Delta] = []
        finished: list[RequestOutput] = []
        for sequence in self.scheduler.take_ended():
            live = self._live.get(sequence.request_id)
            if live is None or sequence.index not in live.open:
                continue
            live.open.discard(sequence.index)
            completion = live.completions[sequence.index]
            completion.close()
            if live.stream:
                reason: FinishReason | None = sequence.finish_reason  # type: ignore[assignment]
                deltas.append(
                    Delta(
                        sequence.request_id, sequence.index, completion.fresh_text(), [], reason, sequence.stop_reason
                    )
                )
            if not live.open:
                del self._live[sequence.request_id]
                finished.append(_output(live))
        return deltas, finished

    def commit(self, result: StepResult) -> list[Sampled]:
        """The part of taking a step in that the next plan waits for; `deliver` does the rest."""
        progress = self.scheduler.commit(result)
        self.num_sampled += len(progress)
        self.num_compiled += result.compiled
        return progress

    def deliver(self, progress: list[Sampled], result: StepResult) -> tuple[list[Delta], list[RequestOutput]]:
        """Text, stop strings and outputs of a committed step.

        A fault here ends the request that it belongs to (finish_reason `error`), and no other.
        """
        deltas = self._score_prompts()
        finished: list[RequestOutput] = []
        for sampled in progress:
            sequence = sampled.sequence
            live = self._live.get(sequence.request_id)
            # ended meanwhile, by the scheduler or by another completion's fault
            if live is None or sequence.index not in live.open:
                continue
            if live.first_token_time is None:
                live.first_token_time = time.time()
            completion = live.completions[sequence.index]
            try:
                if completion.plain and (sampled.following or sequence.finish_reason is None):
                    deltas.append(
                        Delta(sequence.request_id, sequence.index, completion.extend(sampled.token), [sampled.token])
                    )
                    continue
                delta = self._advance(live, sampled, result)
            except Exception:
                _log.exception("a fault while request %r was worked on", sequence.request_id)
                delta = self._fail(live, sequence)
            if delta is not None:
                deltas.append(delta)
            if not live.open:
                del self._live[sequence.request_id]
                finished.append(_output(live))
        return deltas, finished

    def _score_prompts(self) -> list[Delta]:
        deltas = []
        for scored in self.scheduler.take_scored():
            live = self._live.get(scored.sequence.request_id)
            if live is not None:
                entries = live.completions[scored.sequence.index].prompt_entries(scored)
                deltas.append(Delta(scored.sequence.request_id, scored.sequence.index, "", [], prompt_logprobs=entries))
        return deltas

    def _advance(self, live: _Live, sampled: Sampled, result: StepResult) -> Delta | None:
        sequence = sampled.sequence
        completion = live.completions[sequence.index]
        stop = completion.accept(sampled.token, sampled.row, result, sampled.following > 0)
        if stop is not None:
            if sampled.following:  # drafts after the stop string held, and nobody wants them
                del sequence.tokens[-sampled.following :]
            if sequence.finished:  # the length limit was met by the very token that completes the stop string
                sequence.finish_reason, sequence.stop_reason = "stop", stop
            else:
                self.scheduler.finish(sequence, "stop", stop)
        delta: Delta | None = None
        ended = sequence.finished and (stop is not None or not sampled.following)
        if live.stream:
            reason: FinishReason | None = sequence.finish_reason if ended else None  # type: ignore[assignment]
            logprobs = completion.logprobs[-1] if completion.logprobs else None
            delta = Delta(
                sequence.request_id,
                sequence.index,
                completion.fresh_text(),
                [sampled.token],
                reason,
                sequence.stop_reason if ended else None,
                logprobs,
                completion.text_offset,
            )
        if ended:
            live.open.discard(sequence.index)
        return delta

    def _fail(self, live: _Live, sequence: Sequence) -> Delta | None:
        """End a request whose handling raised."""
        for completion in live.completions:
            other = completion.sequence
            if not other.finished:
                self.scheduler.finish(other, "error", FAULT)
        sequence.finish_reason, sequence.stop_reason = "error", FAULT
        live.open.clear()
        return Delta(sequence.request_id, sequence.index, "", [], "error", FAULT) if live.stream else None

    def _speculation(self, params: SamplingParams) -> Speculation | None:
        """How the request speculates. Raises RequestError if it asks for what the engine was not started with."""
        option = self.scheduler.limits.speculation
        if params.speculation not in (None, "off") and option == "off":
            raise RequestError(
                f"speculation={params.speculation!r} needs an engine that was started with speculation; leave it out"
            )
        return speculation_of(option if params.speculation is None else params.speculation, most_drafts(option))

    def _seed(self, params: SamplingParams, index: int) -> int:
        """The completion's own seed: the caller's plus its index, else a mix of the engine's seed and the arrival
        number.
        """
        if params.seed is not None:
            return (params.seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        mixed = (self.seed * 0x9E3779B97F4A7C15 + self._arrivals + index + 1) & (2 * SEED_LIMIT - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & (2 * SEED_LIMIT - 1)
        return (mixed ^ (mixed >> 31)) - SEED_LIMIT


def _output(live: _Live) -> RequestOutput:
    request = live.request
    outputs = [completion.output() for completion in live.completions]
    cached = live.completions[0].sequence.cached_tokens
    metrics = RequestMetrics(live.arrival_time, live.first_token_time, time.time())
    speculations = [speculation for each in live.completions if (speculation := each.sequence.speculation) is not None]
    return RequestOutput(
        request.request_id,
        request.prompt,
        list(request.prompt_ids),
        outputs,
        True,
        request.adapter,
        cached,
        metrics,
        num_draft_tokens=sum(each.drafted for each in speculations),
        num_accepted_tokens=sum(each.accepted for each in speculations),
        num_history_draft_tokens=sum(each.history_drafted for each in speculations),
        num_history_accepted_tokens=sum(each.history_accepted for each in speculations),
        num_trained_draft_tokens=sum(each.trained_drafted for each in speculations),
        num_trained_accepted_tokens=sum(each.trained_accepted for each in speculations),
    )
