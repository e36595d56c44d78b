"""A tensor-parallel model on rank 0, the process that has the requests: each call is sent to the peers first."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....compiler.options import OptionError
from ....compiler.run.cuda_graph import forget_first_runs
from ....graphs.adapter import Describe
from ....graphs.adapter_config import AdapterError
from ....graphs.adapter_description import describe_adapter
from ....graphs.checkpoint import CheckpointError
from ....graphs.files.update_file import UpdateFile
from ....ops.collectives.exchange import end_waits, unmap_peers
from ....ops.collectives.tensor_parallel_group import RankGroup
from ...adapters.registry import RegisteredAdapter
from ...adapters.slot_loader import LoadReport
from ...api.adapter_versions import version_of
from ...api.errors import CapacityError
from ...engine.resolve import LoadOptions
from ...quantization.rounded_weights import RoundingError
from ...scheduler.step_codec import pack_masks, pack_plan
from ...scheduler.step_plan import SLOT_DAMAGED, PageCopies, Runner, StepDrafts, StepMasks, StepPlan, StepResult
from ..calibrate.first_start import calibrate_at_first_start
from ..model import Model, ModelSource
from ..model_loader import load_model
from ..sleep import Sleeper, check_level, tags_of
from .peer_messages import (
    AddAdapter,
    AddSum,
    CopyPages,
    EndUpdate,
    ForgetAdapter,
    PeerSettings,
    RemoveAdapter,
    RestrictAdapters,
    Sleep,
    StageUpdate,
    StartLoad,
    WakeUp,
    as_builtins,
)
from .peers import MASKS, PAGES, PLAN, Peers, RankError
from .process_group import join_group, leave_group

POLL_SECONDS = 0.0005
SLEEP_ERRORS = {kind.__name__: kind for kind in (CapacityError, CheckpointError, RoundingError, MemoryError, OSError)}
"""Errors of sleep and wake-up that leave a rank unchanged."""


class ParallelRunner:
    """Executes each plan on all ranks, the peers first; implements `Runner`. An error ends the group."""

    def __init__(self, runner: Runner, peers: Peers) -> None:
        self._runner, self._peers = runner, peers
        self._num_reports: Counter[tuple[int, int]] = Counter()
        self._errors: dict[tuple[int, int], str] = {}
        self._ended: list[LoadReport] = []

    def submit(self, plan: StepPlan) -> Any:
        """See `Runner`. Raises RankError."""
        self._peers.send(PLAN, pack_plan(plan))
        return self._run(lambda: self._runner.submit(plan))

    def drafts(self, handle: Any) -> StepDrafts:
        """See `Runner`; all ranks have the same drafts. Raises RankError."""
        drafts: StepDrafts = self._run(lambda: self._runner.drafts(handle))
        return drafts

    def constrain(self, handle: Any, masks: StepMasks) -> None:
        """See `Runner`. Raises RankError."""
        self._peers.send(MASKS, pack_masks(masks))
        self._run(lambda: self._runner.constrain(handle, masks))

    def collect(self, handle: Any) -> StepResult:
        """See `Runner`. Raises RankError."""
        result: StepResult = self._run(lambda: self._runner.collect(handle))
        return result

    def start_load(self, slot: int, number: int) -> None:
        """See `Runner`."""
        self._peers.send_order(StartLoad(slot, number))
        self._runner.start_load(slot, number)

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """See `Runner`; a load has ended when it has ended on all ranks."""
        return self._take_ended(lambda slot: slot != PAGES, timeout)

    def copy_pages(self, copies: PageCopies) -> None:
        """See `Runner`; each rank copies its part of the pages."""
        self._peers.send_order(CopyPages(copies))
        self._runner.copy_pages(copies)

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """See `Runner`; copies have ended when they have ended on all ranks."""
        return [(ticket, error) for _, ticket, error in self._take_ended(lambda slot: slot == PAGES, timeout)]

    def _take_ended(self, wanted: Callable[[int], bool], timeout: float) -> list[LoadReport]:
        """Return what ended on all ranks in `wanted` slots. Wait up to `timeout` seconds for the first."""
        until = time.monotonic() + timeout
        while True:
            reports = self._runner.loaded()
            reports += [(PAGES, ticket, error) for ticket, error in self._runner.copied()]
            reports += [(each["slot"], each["number"], each["error"]) for each in self._peers.finished_loads()]
            damaged = [report for report in reports if report[2] == SLOT_DAMAGED]  # by one rank, without a load
            loads = [self._count(report) for report in reports if report not in damaged]
            self._ended += damaged + [(*load, self._errors.pop(load, None)) for load in loads if load]
            ended = [report for report in self._ended if wanted(report[0])]
            if ended or time.monotonic() >= until:
                self._ended = [report for report in self._ended if not wanted(report[0])]
                return ended
            time.sleep(POLL_SECONDS)

    def forget_adapter(self, number: int) -> None:
        """See `Runner`."""
        self._peers.send_order(ForgetAdapter(number))
        self._runner.forget_adapter(number)

    def _count(self, report: tuple[int, int, str | None]) -> tuple[int, int] | None:
        """Count a report; return its slot and adapter once all ranks have reported."""
        slot, number, error = report
        load = slot, number
        self._num_reports[load] += 1
        if error is not None:
            self._errors.setdefault(load, error)
        if self._num_reports[load] < self._peers.tp_size:
            return None
        del self._num_reports[load]
        return load

    def _run(self, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except Exception as error:
            raise self._peers.end_after(error) from error
        self._peers.check()  # results without a peer's part are wrong
        return result


class ParallelSleeper:
    """`Sleeper` on all ranks at the same time. A rank that fails is unchanged, and the call may be repeated."""

    def __init__(self, sleeper: Sleeper, peers: Peers) -> None:
        self._sleeper, self._peers = sleeper, peers
        self._peers_asleep: frozenset[str] = frozenset()

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that is released on any rank."""
        return self._sleeper.asleep | self._peers_asleep

    def sleep(self, level: int) -> None:
        """See `Sleeper.sleep`. If a rank has too little host memory, no rank sleeps. Raises RankError too."""
        check_level(level)
        if self.asleep:
            return
        try:
            self._on_all(Sleep(level), lambda: self._sleeper.sleep(level))
        except MemoryError:
            self.wake_up(None)
            raise

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """See `Sleeper.wake_up`. Raises RankError too."""
        wanted = tags_of(tags)
        self._on_all(WakeUp(list(wanted)), lambda: self._sleeper.wake_up(wanted))

    def _on_all(self, order: Sleep | WakeUp, call: Callable[[], None]) -> None:
        """Send an order to the peers and call the same here; raise the first error after all have finished."""
        self._peers.send_order(order)
        failure: Exception | None = None
        try:
            call()
        except tuple(SLEEP_ERRORS.values()) as error:
            failure = error
        answers = self._peers.wait_for("slept")
        self._peers_asleep = frozenset(tag for answer in answers for tag in answer["asleep"])
        for tp_rank, answer in enumerate(answers, start=1):
            if failure is None and answer["kind"]:
                failure = SLEEP_ERRORS[answer["kind"]](f"rank {tp_rank} of {self._peers.tp_size}: {answer['error']}")
        if failure is not None:
            raise failure


@dataclass
class ParallelModel(Model):
    """`Model` on several ranks. `peers`: the other ranks; `group`: the process group."""

    peers: Peers = None  # type: ignore[assignment]  # fields with defaults come before it
    group: RankGroup = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._parallel_runner = ParallelRunner(self.runner, self.peers)
        self._parallel_sleeper = None if self.sleeper is None else ParallelSleeper(self.sleeper, self.peers)

    @property
    def executor(self) -> Runner:
        """See `Model.executor`."""
        return self._parallel_runner

    @property
    def sleep_control(self) -> ParallelSleeper | None:
        """See `Model.sleep_control`."""
        return self._parallel_sleeper

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> RegisteredAdapter:
        """See `Model.add_adapter`; all ranks add it or none. Raises RankError too."""
        adapter = super().add_adapter(name, path, replace)
        directory = str(Path(path).resolve())
        self.peers.send_order(AddAdapter(name, directory, replace, adapter.number, adapter.content_hash))
        error = next((each["error"] for each in self.peers.wait_for("added") if each["error"]), None)
        if error is not None:
            self.remove_adapter(name)
            self._parallel_runner.forget_adapter(adapter.number)
            raise AdapterError(error)
        return adapter

    def update_adapter(
        self, name: str, file: UpdateFile, version: int | None = None, switch: bool = False
    ) -> tuple[RegisteredAdapter, list[int]]:
        """See `Model.update_adapter`; all ranks have the update before it gets its name. Raises RankError too."""
        update = self.stage_update(name, file, version, switch)
        published = False
        try:
            file.complete()
            path, made = f"/proc/{os.getpid()}/fd/{file.handle}", version_of(update.name)
            self.peers.send_order(StageUpdate(name, path, made, update.number, update.content_hash))
            error = next((each["error"] for each in self.peers.wait_for("added") if each["error"]), None)
            if error is not None:
                raise AdapterError(error)
            gone = self.publish_update(update)
            published = True
        finally:
            if not published:
                self.drop_update(update.number)
            self.peers.send_order(EndUpdate(update.number, published))
        return update, gone

    def add_sum(self, number: int, parts: Sequence[tuple[int, float]]) -> None:
        """See `Model.add_sum`. Raises RankError too."""
        super().add_sum(number, parts)
        self.peers.send_order(AddSum(number, list(parts)))

    def remove_adapter(self, name: str) -> int:
        """See `Model.remove_adapter`."""
        number = super().remove_adapter(name)
        self.peers.send_order(RemoveAdapter(name))
        return number

    def restrict_adapters(self, roots: Sequence[str | Path]) -> None:
        """See `Model.restrict_adapters`."""
        super().restrict_adapters(roots)
        self.peers.send_order(RestrictAdapters([str(root) for root in roots]))

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """See `Model.on_lost`. The callback runs on another thread."""
        self.peers.on_lost = callback
        try:
            self.peers.check()
        except RankError as error:
            callback(str(error))

    def close(self) -> None:
        """End the other ranks."""
        _end(self.peers, self.group)


def _end_waits(peers: Peers, group: RankGroup) -> None:
    """After the end of the group: end the waits of this rank's kernels."""
    peers.wait_for_exit()  # no peer signals any more
    end_waits(group)


def _end(peers: Peers, group: RankGroup | None) -> None:
    """End the other ranks, and leave the group, if this rank has joined it."""
    if group is not None:
        unmap_peers(group)
    peers.close()
    if group is not None:
        leave_group(group)


def load_parallel_model(
    model: str | Path | Mapping[str, Any],
    source: ModelSource,
    adapters: Mapping[str, str | Path],
    options: LoadOptions,
    keywords: Mapping[str, Any],
    describe: Describe = describe_adapter,
) -> Model:
    """Load a model on all ranks of the options, or with one rank in this process. `source` and `options` come from
    `find_model` with `model` and `keywords`.

    Raises what `load_model` raises, OptionError for options that need one process, and RankError if a rank cannot
    start.
    """
    tp_size, device = options.compiler.tensor_parallel, options.device
    options = calibrate_at_first_start(source, options)
    if tp_size == 1:
        return load_model(source, adapters, options, describe)
    if device.type == "cuda" and device.index + tp_size > torch.cuda.device_count():
        raise OptionError(
            f"tensor_parallel_size={tp_size} needs {tp_size} GPUs from {device} on, and there are "
            f"{torch.cuda.device_count()}; lower it, or use device='cpu'"
        )
    settings = PeerSettings(
        tp_rank=0,
        tp_size=tp_size,
        device=str(device),
        model=dict(model) if isinstance(model, Mapping) else str(source.directory),
        llm=as_builtins(keywords),
        adapters={name: str(Path(path).resolve()) for name, path in adapters.items()},
    )
    peers, group = Peers(settings), None
    try:
        peers.wait_for("started")
        joined = group = join_group(0, tp_size, peers.store_fd, device, peers.check)
        forget_first_runs()  # the other ranks are new processes, and all ranks must run the same collectives
        peers.on_lost = lambda reason: _end_waits(peers, joined)
        loaded = load_model(source, adapters, options, describe)
        peers.wait_for("ready")
    except BaseException as error:
        # an error of torch.distributed may follow from the end of a rank, which has the cause
        cause = None
        if isinstance(error, RuntimeError) and not isinstance(error, RankError):
            cause = peers.end_after(error)
        _end(peers, group)
        if cause is not None:
            raise cause from error
        raise
    return ParallelModel(**vars(loaded), peers=peers, group=group)
