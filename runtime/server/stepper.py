"""The batcher's engine half: plans go to the GPU process up to two steps ahead, results come back, adapters are
brought in while steps run.
"""

import time
from dataclasses import asdict
from typing import Any

from ..api.outputs import RequestOutput
from ..api.request import Delta, Request
from ..engine.engine import Engine
from ..processes.watch import AwakeClock, StepWatch
from ..scheduler.scheduler import Scheduler, SchedulerLimits
from ..scheduler.step_plan import AHEAD, StepDrafts, StepMasks, StepPlan, StepResult
from ..text.adapter_chat import warn_of_tokens
from ..text.tokenizer import Tokenizer
from .gpu_link import BatcherEnd, Load, LoadDone, LoadedAdapter, Ready, Retire, StartLoad, Timing, Unload
from .shared_masks import SharedMasks

BRIEF_TOKENS = 1024
"""A step of more tokens is long enough for the next plan to be ready in time; a third one in line would only make
new requests wait.
"""
Progress = tuple[list[Delta], list[RequestOutput]]


class RemoteRunner:
    """The GPU process in place of a runner: steps are shipped by `Stepper.pump`, loads are reported by messages.

    `hashes`: adapter number -> content hash; what nobody uses any more is taken out of it.
    """

    def __init__(self, link: BatcherEnd, hashes: dict[int, str]) -> None:
        self._link, self._hashes = link, hashes
        self._reports: list[tuple[int, int, str | None]] = []

    def start_load(self, slot: int, number: int) -> None:
        """Have an adapter brought into a slot (-1: into host memory)."""
        self._link.tell(StartLoad(slot, number))

    def forget_adapter(self, number: int) -> None:
        """Have an adapter dropped."""
        self._hashes.pop(number, None)  # not before: its last requests share pages by it
        self._link.tell(Retire(number))

    def report(self, done: LoadDone) -> None:
        """A load is over."""
        self._reports.append((done.slot, done.number, done.problem))

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """What `report` was told since the last call; never waits."""
        reports, self._reports = self._reports, []
        return reports

    def submit(self, plan: StepPlan) -> None:
        """Ship a step."""
        self._link.submit(plan)

    def constrain(self, handle: Any, masks: StepMasks) -> None:
        """Ship a step's masks."""
        self._link.constrain(masks)

    def drafts(self, handle: Any) -> StepDrafts:
        """Never called: drafts come as messages."""
        raise RuntimeError("drafts of the GPU process are not waited for")

    def collect(self, handle: Any) -> StepResult:
        """Never called: results come as messages."""
        raise RuntimeError("results of the GPU process are not waited for")


class Stepper:
    """One life of the GPU process, from its `Ready` on.

    `late_plans`: plans that came when the device had nothing left to do though requests were open; `idle_seconds`: how
    long it stood still for want of them; `busy_seconds`: this process's own work on steps, `plan_seconds` the part of
    it that the next plan waits for; `launch_seconds`: from a plan's arrival at the GPU process until all of it is
    launched; `watch`: whether a step takes too long (`step_timeout`: see there). `masks`: where masks are to lie.
    """

    def __init__(
        self,
        ready: Ready,
        link: BatcherEnd,
        tokenizer: Tokenizer | None,
        seed: int = 0,
        step_timeout: float | None = None,
        clock: AwakeClock | None = None,
        masks: SharedMasks | None = None,
    ) -> None:
        self.ready = ready
        self.link = link
        self.numbers: dict[str, int] = {adapter.name: adapter.number for adapter in ready.adapters}
        self.hashes: dict[int, str] = {adapter.number: adapter.content for adapter in ready.adapters}
        self.known: dict[str, LoadedAdapter] = {adapter.name: adapter for adapter in ready.adapters}
        self._tokenizer = tokenizer
        for adapter in ready.adapters:
            warn_of_tokens(adapter.name, adapter.chat, tokenizer)
        limits = SchedulerLimits(
            ready.num_pages,
            ready.max_model_len,
            ready.max_num_seqs,
            ready.max_num_batched_tokens,
            ready.num_slots,
            ready.prefix_caching,
            speculation=ready.speculation,
            step_times=tuple(ready.step_times),
            speculation_history=ready.speculation_history,
        )
        self.scheduler = Scheduler(limits, self.numbers, self.hashes, asynchronous_loads=True)
        if masks is not None:
            self.scheduler.place_masks(masks.take)
        self._remote = RemoteRunner(link, self.hashes)
        self.engine = Engine(self.scheduler, self._remote, tokenizer, ready.eos_ids, seed, overlap=True)
        self.in_host_memory: set[int] = set()
        self.in_flight = 0
        self.watch = StepWatch(clock or AwakeClock(), step_timeout, ready.device, ready.longest_step)
        self.steps = self.late_plans = self.failed_steps = 0
        self.idle_seconds = self.busy_seconds = self.plan_seconds = self.longest_busy = self.device_seconds = (
            self.launch_seconds
        ) = 0.0
        self.last_step_seconds = 0.0
        self._done_before = 0
        self._brief = False
        self._continuing: dict[int, bool] = {}

    def add(self, request: Request, stream: bool) -> None:
        """Queue a request. Raises RequestError."""
        self.engine.add(request, stream)

    def pump(self, continuing: bool = False) -> None:
        """Plan and ship ahead: one step, or two after one that is short and whose sequences all go on.

        `continuing`: a step has just come back.
        """
        while self.in_flight < (AHEAD if self._brief else AHEAD - 1):
            plan = self.engine.plan()
            if plan is None:
                return
            self._brief = plan.num_tokens <= BRIEF_TOKENS and not self.scheduler.waits_for_results
            self._continuing[plan.step] = continuing or self.in_flight > 0
            self._remote.submit(plan)
            self.watch.shipped(plan.step)
            self.in_flight += 1
            self._constrain()

    def _constrain(self) -> None:
        """Ship the masks that the oldest step in flight waits for, if what they follow from has come."""
        masks = self.engine.masks_due()
        if masks is not None:
            self._remote.constrain(None, masks)

    def take_drafts(self, drafts: StepDrafts) -> None:
        """What the device drafted in a step that waits for masks."""
        begin = time.perf_counter()
        self.scheduler.take_drafts(drafts)
        self._constrain()
        self.busy_seconds += time.perf_counter() - begin

    def take(self, result: StepResult, timing: Timing) -> Progress:
        """A step's tokens: masks that follow from them are begun, the next plan goes out, then the masks, and then the
        tokens become text.
        """
        begin = time.perf_counter()
        self.in_flight -= 1
        self.watch.returned()
        progress = self.engine.commit(result)
        self.engine.begin_masks()
        if self.scheduler.drafts_due and (drafts := self.link.drafts()) is not None:
            self.scheduler.take_drafts(drafts)
        self.pump(continuing=True)
        self._constrain()
        self.plan_seconds += time.perf_counter() - begin
        output = self.engine.deliver(progress, result)
        self._note(result.step, timing, time.perf_counter() - begin)
        return output

    def fail(self, step: int) -> None:
        """A step raised on the device: its requests are computed again in smaller groups."""
        self.in_flight -= 1
        self.watch.returned()
        self.failed_steps += 1
        self._continuing.pop(step, None)
        self.scheduler.fail_step(step)
        self._constrain()

    def requests_of(self, step: int) -> set[str]:
        """The ids of the requests that a step in flight computes."""
        return {sequence.request_id for sequence in self.scheduler.issued(step)}

    def take_ended(self) -> Progress:
        """What the scheduler ended by itself: deadlines, failed loads, failed steps."""
        return self.engine.take_ended()

    def load_done(self, done: LoadDone) -> None:
        """An adapter has arrived on the device, or could not be brought there."""
        self._remote.report(done)
        self.engine.take_loads_in()

    def register(self, adapter: LoadedAdapter) -> None:
        """An adapter that the GPU process has read; a name's former adapter serves its requests to their end."""
        self.retire(adapter.name)
        warn_of_tokens(adapter.name, adapter.chat, self._tokenizer)
        self.hashes[adapter.number] = adapter.content
        self.known[adapter.name] = adapter
        self.numbers[adapter.name] = adapter.number

    def retire(self, name: str) -> None:
        """A name is taken away."""
        former = self.known.pop(name, None)
        if former is not None:
            del self.numbers[name]
            self.scheduler.forget_adapter(former.number)

    def read_adapter(self, ticket: int, name: str, path: str, replace: bool) -> None:
        """Ask the GPU process for an adapter."""
        self.link.tell(Load(ticket, name, path, replace))

    def drop_adapter(self, ticket: int, name: str) -> None:
        """Have the GPU process forget a name."""
        self.link.tell(Unload(ticket, name))

    def close(self) -> None:
        """End this life's threads."""
        self.engine.close()

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges."""
        scheduler = self.scheduler
        values: dict[str, int | float] = {
            "steps_total": self.steps,
            "tokens_total": self.engine.num_sampled,
            "kernels_compiled_in_steps_total": self.engine.num_compiled,
            "late_plans_total": self.late_plans,
            "failed_steps_total": self.failed_steps,
            "gpu_idle_seconds_total": self.idle_seconds,
            "gpu_step_seconds_total": self.device_seconds,
            "batcher_step_seconds_total": self.busy_seconds,
            "plan_seconds_total": self.plan_seconds,
            "launch_seconds_total": self.launch_seconds,
            "batcher_step_seconds_longest": self.longest_busy,
            "steps_in_flight": self.in_flight,
            "requests_running": len(scheduler.states.running),
            "requests_waiting": scheduler.num_waiting,
            "adapters": len(self.known),
        }
        return values | published(asdict(scheduler.stats()))

    def _note(self, step: int, timing: Timing, seconds: float) -> None:
        self.steps += 1
        self.busy_seconds += seconds
        self.longest_busy = max(self.longest_busy, seconds)
        self.last_step_seconds = (timing.done - max(timing.received, self._done_before)) / 1e9
        self.device_seconds += self.last_step_seconds
        self.launch_seconds += (timing.launched - timing.received) / 1e9
        if self._continuing.pop(step, False) and timing.received > self._done_before > 0:
            self.late_plans += 1
            self.idle_seconds += (timing.received - self._done_before) / 1e9
        self._done_before = timing.done


def published(counted: dict[str, int]) -> dict[str, int | float]:
    """The scheduler's counters by the names that clients see."""
    values: dict[str, int | float] = {
        "pages": counted["pages"],
        "pages_in_use": counted["pages_used"],
        "adapter_hits_total": counted["adapter_admissions"] - counted["adapter_loads"],
        "adapter_misses_total": counted["adapter_loads"],
        "draft_tokens_total": counted["drafted"],
        "accepted_tokens_total": counted["accepted"],
        "history_draft_tokens_total": counted["history_drafted"],
        "history_accepted_tokens_total": counted["history_accepted"],
        "trained_draft_tokens_total": counted["trained_drafted"],
        "trained_accepted_tokens_total": counted["trained_accepted"],
    }
    values |= {name: counted[name] for name in ("pages_cached", "adapters_resident", "adapters_loading")}
    totals = (
        "preemptions",
        "timeouts",
        "prefix_queries",
        "prefix_hits",
        "page_evictions",
        "adapter_evictions",
        "adapter_failures",
    )
    return values | {f"{name}_total": counted[name] for name in totals}
