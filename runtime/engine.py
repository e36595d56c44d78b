"""The loop between scheduler and runner, and what becomes of the tokens. Knows neither torch nor a device."""
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from .completion import Completion
from .errors import RequestError
from .outputs import FinishReason, RequestOutput
from .plan import StepPlan, StepResult
from .request import Sequence
from .sampling_params import SEED_LIMIT, SamplingParams
from .scheduler import Scheduler
from .tokenizer import Tokenizer


class Runner(Protocol):
    """Executes plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> Any:
        """Start a step; returns at once where the device works by itself."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a submitted step. Steps are collected in order."""
        ...


@dataclass(frozen=True)
class Request:
    """What is asked: already tokenized and checked."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    adapter: str | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to one completion."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class _Live:
    request: Request
    completions: list[Completion]
    unfinished: int
    stream: bool


class Engine:
    """Runs requests to their end.

    `overlap`: plan step n + 1 while the device computes step n (results are then taken in one step late); without a device there is nothing to
    overlap. `eos_ids` end a text unless ignore_eos. `num_sampled` counts the tokens made so far.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None, eos_ids: Iterable[int] = (), seed: int = 0, overlap: bool = False
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

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return bool(self._live) or bool(self._in_flight)

    def add(self, request: Request, stream: bool = False) -> None:
        """Queue a request. Raises RequestError (and queues nothing) if it can never run; `stream` makes its text token by token."""
        if request.request_id in self._live:
            raise RequestError(f"request_id={request.request_id!r} is in use; choose another")
        params, limits = request.params, self.scheduler.limits
        prompt_length = len(request.prompt_ids)
        room = limits.max_model_len - prompt_length
        limit = prompt_length + (room if params.max_tokens is None else min(params.max_tokens, room))
        completions = []
        for index in range(params.n):
            sequence = Sequence(
                arrival=self._arrivals, request_id=request.request_id, index=index, tokens=list(request.prompt_ids), prompt_length=prompt_length, limit=limit,
                params=params, seed=self._seed(params, index), stop_ids=frozenset(params.stop_ids), eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
                adapter=request.adapter)
            self.scheduler.add(sequence)
            self._arrivals += 1
            completions.append(Completion(sequence, self.tokenizer, stream))
        self._live[request.request_id] = _Live(request, completions, params.n, stream)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids (it may just have finished) are ignored."""
        live = self._live.pop(request_id, None)
        for completion in live.completions if live else ():
            self.scheduler.finish(completion.sequence, "abort")

    def step(self) -> tuple[list[Delta], list[RequestOutput]]:
        """Advance by one step: what was added to requests that stream, and the requests that finished."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self.runner.submit(plan))
        if not self._in_flight or (plan is not None and len(self._in_flight) <= self._depth):
            return [], []
        return self._take_in(self.runner.collect(self._in_flight.popleft()))

    def _take_in(self, result: StepResult) -> tuple[list[Delta], list[RequestOutput]]:
        deltas: list[Delta] = []
        finished: list[RequestOutput] = []
        progress = self.scheduler.commit(result)
        self.num_sampled += len(progress)
        for sampled in progress:
            sequence = sampled.sequence
            live = self._live[sequence.request_id]
            completion = live.completions[sequence.index]
            stop = completion.accept(sampled.token, sampled.row, result)
            if stop is not None:
                if sequence.finished:  # the length limit was met by the very token that completes the stop string
                    sequence.finish_reason, sequence.stop_reason = "stop", stop
                else:
                    self.scheduler.finish(sequence, "stop", stop)
            if live.stream:
                reason: FinishReason | None = sequence.finish_reason  # type: ignore[assignment]
                deltas.append(Delta(sequence.request_id, sequence.index, completion.fresh_text(), [sampled.token], reason, sequence.stop_reason))
            if sequence.finished:
                live.unfinished -= 1
                if live.unfinished == 0:
                    del self._live[sequence.request_id]
                    finished.append(_output(live))
        return deltas, finished

    def _seed(self, params: SamplingParams, index: int) -> int:
        """The completion's own seed: the caller's plus its index, else a mix of the engine's seed and the arrival number."""
        if params.seed is not None:
            return (params.seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        mixed = (self.seed * 0x9E3779B97F4A7C15 + self._arrivals + 1) & (2 * SEED_LIMIT - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & (2 * SEED_LIMIT - 1)
        return (mixed ^ (mixed >> 31)) - SEED_LIMIT


def _output(live: _Live) -> RequestOutput:
    request = live.request
    outputs = [completion.output() for completion in live.completions]
    return RequestOutput(request.request_id, request.prompt, list(request.prompt_ids), outputs, True, request.adapter)
