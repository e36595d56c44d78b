"""The batcher's engine: submits up to two steps ahead, receives results, and loads adapters while steps run."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from msgspec import structs

from ...ops.core.kv_layout import PAGE_SIZE
from ..adapters.adapter_sums import AdapterNumbers, SumPart
from ..api.adapter_versions import names_to_remove, split_version, version_of
from ..api.errors import RequestError
from ..api.outputs import RequestOutput
from ..api.request import Delta
from ..engine.engine import Engine
from ..processes.watchdog import AwakeClock, StepWatchdog
from ..scheduler.scheduler import Scheduler, SchedulerLimits
from ..scheduler.step_plan import AHEAD, PageCopies, StepDrafts, StepMasks, StepPlan, StepResult
from ..text.tokenizer import Tokenizer
from .gpu_link import (
    BatcherLink,
    Compose,
    CopyPages,
    LoadDone,
    LoadedAdapter,
    PagesCopied,
    Ready,
    Retire,
    StartLoad,
    Timing,
)
from .shared_masks import SharedMasks

SHORT_STEP_TOKENS = 1024
"""After a step of more tokens only one step is submitted ahead. Its plan arrives in time, and a second would delay new
requests.
"""
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the counted sizes of steps, as in vLLM."""
Progress = tuple[list[Delta], list[RequestOutput]]


class RemoteRunner:
    """The GPU process as a runner. Results, drafts and finished loads arrive as messages.

    `hashes`, `invocations`: adapter number -> content hash, and invocation; `forget_adapter` removes entries.
    """

    def __init__(self, link: BatcherLink, hashes: dict[int, str], invocations: dict[int, tuple[int, ...]]) -> None:
        self._link, self._hashes, self._invocations = link, hashes, invocations
        self._finished_loads: list[tuple[int, int, str | None]] = []

    def start_load(self, slot: int, number: int) -> None:
        """Load an adapter into a slot (-1: into host memory)."""
        self._link.send(StartLoad(slot, number))

    def forget_adapter(self, number: int) -> None:
        self._hashes.pop(number, None)  # not earlier: its last requests share pages by this hash
        self._invocations.pop(number, None)
        self._link.send(Retire(number))

    def finish_load(self, done: LoadDone) -> None:
        self._finished_loads.append((done.slot, done.number, done.problem))

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """Return (slot, number, error) of the loads that ended since the last call. Never waits."""
        loads, self._finished_loads = self._finished_loads, []
        return loads

    def copy_pages(self, copies: PageCopies) -> None:
        self._link.send(CopyPages(copies))

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """Return nothing: `Stepper.pages_copied` reports to the scheduler."""
        return []

    def submit(self, plan: StepPlan) -> None:
        self._link.submit(plan)

    def constrain(self, handle: Any, masks: StepMasks) -> None:
        self._link.constrain(masks)

    def drafts(self, handle: Any) -> StepDrafts:
        raise RuntimeError("drafts of the GPU process arrive as messages")

    def collect(self, handle: Any) -> StepResult:
        raise RuntimeError("results of the GPU process arrive as messages")


class Stepper:
    """The engine that uses one GPU process, from its `Ready` on.

    late_plans      plans that arrived after the device had become idle although requests were open
    idle_seconds    idle time of the device because of late plans
    busy_seconds    this process's time for steps; `plan_seconds` is the part before the next plan is sent
    launch_seconds  time from a plan's arrival in the GPU process until it is launched
    step_sizes      numbers of steps by their tokens, between the bounds STEP_TOKENS
    watchdog        limit on a step's time (`step_timeout`: see there)
    adapters        adapters by name
    adapter_numbers numbers of adapters and of their sums
    masks           shared memory for masks, if there is any
    paused          no steps are planned; deadlines pass
    """

    def __init__(
        self,
        ready: Ready,
        link: BatcherLink,
        tokenizer: Tokenizer | None,
        seed: int = 0,
        step_timeout: float | None = None,
        clock: AwakeClock | None = None,
        masks: SharedMasks | None = None,
        named_sums: Mapping[str, str] | None = None,
    ) -> None:
        self.ready = ready
        self.link = link
        self.numbers: dict[str, int] = {adapter.name: adapter.number for adapter in ready.adapters}
        self.hashes: dict[int, str] = {adapter.number: adapter.content for adapter in ready.adapters}
        self.invocations = {adapter.number: adapter.invocation for adapter in ready.adapters if adapter.invocation}
        self.adapters: dict[str, LoadedAdapter] = {adapter.name: adapter for adapter in ready.adapters}
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
            host_pages=ready.host_pages,
            disk_pages=ready.disk_pages,
            disk_prefix=ready.disk_prefix,
            exact=ready.exact,
            cascade_tile=ready.cascade_tile,
            cascade_pages=ready.cascade_pages,
            kv_role=ready.kv_role,
        )
        self.adapter_numbers = AdapterNumbers(
            self.numbers,
            self._find_part,
            self._compose,
            lambda number: self.scheduler.forget_adapter(number),
            ready.lora_rank,
            "--max-lora-rank ",
            ready.max_adapter_sums,
            named_sums,
        )
        self.scheduler = Scheduler(limits, self.adapter_numbers, self.hashes, self.invocations, asynchronous_loads=True)
        if masks is not None:
            self.scheduler.place_masks(masks.allocate)
        self._remote = RemoteRunner(link, self.hashes, self.invocations)
        self.engine = Engine(self.scheduler, self._remote, tokenizer, ready.eos_ids, seed, overlap=True)
        for adapter in ready.adapters:
            if version := version_of(adapter.name):
                self.engine.switches.add(adapter.name, adapter.number, version, switch=False)
        self.in_host_memory: set[int] = set()
        self.in_flight = 0
        self.paused = False
        self.watchdog = StepWatchdog(clock or AwakeClock(), step_timeout, ready.device, ready.longest_step)
        self.step_sizes, self.planned_tokens = [0] * (len(STEP_TOKENS) + 1), 0
        self.steps = self.late_plans = self.failed_steps = 0
        self.idle_seconds = self.busy_seconds = self.plan_seconds = self.longest_busy = self.device_seconds = (
            self.launch_seconds
        ) = 0.0
        self.last_step_seconds = 0.0
        self._last_done = 0
        self._last_is_short = False
        self._continuing: dict[int, bool] = {}

    def submit_steps(self, continuing: bool = False) -> None:
        """Plan and submit steps: one ahead, or two after a short step in which all sequences continue.

        `continuing`: a step has just returned.
        """
        if self.paused:
            self.scheduler.expire()
            return
        while self.in_flight < (AHEAD if self._last_is_short else AHEAD - 1):
            plan = self.engine.plan()
            if plan is None:
                return
            self.planned_tokens += plan.num_tokens
            self.step_sizes[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
            self._last_is_short = plan.num_tokens <= SHORT_STEP_TOKENS and not self.scheduler.waits_for_results
            self._continuing[plan.step] = continuing or self.in_flight > 0
            self._remote.submit(plan)
            self.watchdog.step_submitted(plan.step)
            self.in_flight += 1
            self._send_masks()

    def _send_masks(self) -> None:
        """Send the masks of the oldest step in flight, if their inputs have arrived."""
        masks = self.engine.masks_due()
        if masks is not None:
            self._remote.constrain(None, masks)

    def receive_drafts(self, drafts: StepDrafts) -> None:
        """Receive the drafts of a step that waits for masks."""
        begin = time.perf_counter()
        self.scheduler.take_drafts(drafts)
        self._send_masks()
        self.busy_seconds += time.perf_counter() - begin

    def receive_result(self, result: StepResult, timing: Timing) -> Progress:
        """Receive a step's tokens: start its masks, send the next plan and the masks, then detokenize."""
        begin = time.perf_counter()
        self.in_flight -= 1
        self.watchdog.step_returned()
        progress = self.engine.commit(result)
        self.engine.begin_masks()
        if self.scheduler.drafts_due and (drafts := self.link.receive_drafts()) is not None:
            self.scheduler.take_drafts(drafts)
        self.submit_steps(continuing=True)
        self._send_masks()
        self.plan_seconds += time.perf_counter() - begin
        output = self.engine.deliver(progress, result)
        self._record_step(result.step, timing, time.perf_counter() - begin)
        return output

    def fail_step(self, step: int) -> None:
        """Recompute the requests of a step that raised on the device in smaller groups."""
        self.in_flight -= 1
        self.watchdog.step_returned()
        self.failed_steps += 1
        self._continuing.pop(step, None)
        self.scheduler.fail_step(step)
        self._send_masks()

    def requests_in_step(self, step: int) -> set[str]:
        return {sequence.request_id for sequence in self.scheduler.issued(step)}

    def finish_load(self, done: LoadDone) -> None:
        self._remote.finish_load(done)
        self.engine.take_loads_in()

    def pages_copied(self, done: PagesCopied) -> None:
        self.scheduler.copies_done(done.ticket, done.problem)
        self.engine.start_copies()

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Add an adapter that the GPU process has read. Requests of a replaced one keep it until they end."""
        self.remove_adapter(adapter.name)
        self.hashes[adapter.number] = adapter.content
        if adapter.invocation:
            self.invocations[adapter.number] = adapter.invocation
        self.adapters[adapter.name] = adapter
        self.numbers[adapter.name] = adapter.number

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter's name with all its versions, or an old version, if it exists."""
        if name in self.adapters:
            self._remove_names(names_to_remove(name, self.adapters))

    def update_adapter(self, update: LoadedAdapter, removed: Sequence[str], switch: bool) -> None:
        """Add a version that the GPU process has packed, as the newest one of its adapter. `removed`: names that are
        gone; `switch`: running requests go on with it.
        """
        name, number = split_version(update.name)[0], update.number
        former = self.adapters.get(name)
        self.hashes[number] = update.content
        if update.invocation:
            self.invocations[number] = update.invocation
        self.adapters |= {update.name: update, name: structs.replace(update, name=name)}
        self.numbers |= {update.name: number, name: number}
        self._remove_names(removed)
        if former is not None and former.number not in self.numbers.values():
            self.scheduler.forget_adapter(former.number)
        self.engine.switches.add(name, number, version_of(update.name), switch)

    def _remove_names(self, names: Sequence[str]) -> None:
        """Remove names, and the adapters that have no other one."""
        removed = {self.adapters.pop(name).number for name in names if name in self.adapters}
        for name in names:
            self.numbers.pop(name, None)
        for number in removed - set(self.numbers.values()):
            self.scheduler.forget_adapter(number)

    def _find_part(self, name: str) -> SumPart:
        adapter = self.adapters.get(name)
        if adapter is not None:
            return SumPart(adapter.number, adapter.rank, adapter.content, adapter.obstacle)
        raise RequestError(f"adapter {name!r} is not known")

    def _compose(self, number: int, parts: Sequence[tuple[int, float]], content: str) -> None:
        self.hashes[number] = content
        self.link.send(Compose(number, list(parts)))

    def close(self) -> None:
        self.engine.close()

    def stats(self) -> dict[str, int | float]:
        """Return counters and gauges by name."""
        scheduler = self.scheduler
        values: dict[str, int | float] = {
            "steps_total": self.steps,
            "tokens_total": self.engine.num_sampled,
            "planned_steps_total": sum(self.step_sizes),
            "planned_tokens_total": self.planned_tokens,
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
            "adapters": len(self.adapters),
            "prefix_caching": int(scheduler.limits.prefix_caching),
            "on_gpu": int(self.ready.device != "cpu"),
            "max_lora_rank": self.ready.lora_rank,
        }
        values |= {
            f"steps_up_to_{bound}_tokens_total": count
            for bound, count in zip(STEP_TOKENS, accumulate(self.step_sizes), strict=False)
        }
        return values | published(asdict(scheduler.stats()))

    def _record_step(self, step: int, timing: Timing, seconds: float) -> None:
        self.steps += 1
        self.busy_seconds += seconds
        self.longest_busy = max(self.longest_busy, seconds)
        self.last_step_seconds = (timing.done - max(timing.received, self._last_done)) / 1e9
        self.device_seconds += self.last_step_seconds
        self.launch_seconds += (timing.launched - timing.received) / 1e9
        if self._continuing.pop(step, False) and timing.received > self._last_done > 0:
            self.late_plans += 1
            self.idle_seconds += (timing.received - self._last_done) / 1e9
        self._last_done = timing.done


def published(counted: dict[str, int]) -> dict[str, int | float]:
    """Rename the scheduler's counters to the names that clients see."""
    values: dict[str, int | float] = {
        "pages": counted["pages"],
        "pages_in_use": counted["pages_used"],
        "adapter_hits_total": counted["adapter_admissions"] - counted["adapter_loads"],
        "adapter_misses_total": counted["adapter_loads"],
        "page_tokens": PAGE_SIZE,
        "drafts_total": counted["rounds"],
        "draft_tokens_total": counted["drafted"],
        "accepted_tokens_total": counted["accepted"],
        "history_draft_tokens_total": counted["history_drafted"],
        "history_accepted_tokens_total": counted["history_accepted"],
        "trained_draft_tokens_total": counted["trained_drafted"],
        "trained_accepted_tokens_total": counted["trained_accepted"],
    }
    tiers = ("host_pages", "host_pages_used", "disk_pages", "disk_pages_used", "page_leases", "pages_leased")
    gauges = ("pages_cached", "adapters_resident", "adapters_loading", *tiers)
    values |= {name: counted[name] for name in gauges}
    values["requests_waiting_for_adapters"] = counted["waiting_for_adapters"]
    totals = (
        "preemptions",
        "timeouts",
        "prefix_queries",
        "prefix_hits",
        "page_evictions",
        "adapter_evictions",
        "adapter_failures",
        "slot_audit_failures",
        "prefix_host_hits",
        "cascade_steps",
        "host_pages_saved",
        "host_pages_loaded",
        "host_page_evictions",
        "disk_pages_written",
        "disk_pages_read",
        "disk_pages_dropped",
        "disk_pages_damaged",
        "disk_failures",
        "page_leases_expired",
        "page_loads_refused",
    )
    return values | {f"{name}_total": counted[name] for name in totals}
