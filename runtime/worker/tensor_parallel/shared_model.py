"""A model whose ranks are processes of their own. This process is rank 0: it alone has requests, and whatever it runs
its peers run too.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....compiler.options import OptionError
from ....graphs.adapter import Describe
from ....graphs.adapter_config import AdapterError
from ....graphs.adapter_description import describe_adapter
from ....ops.collectives.group import RankGroup
from ...adapters.registry import KnownAdapter
from ...engine.resolve import LoadOptions
from ...scheduler.runner_protocol import Runner
from ...scheduler.step_codec import pack_masks, pack_plan
from ...scheduler.step_plan import StepDrafts, StepMasks, StepPlan, StepResult
from ..calibrate.first_start import with_calibration
from ..model import Model, ModelSource, load_model
from .joining import join_group, leave_group
from .peers import MASKS, PLAN, Peers, RankError
from .settings import (
    AddAdapter,
    ForgetAdapter,
    PeerSettings,
    RemoveAdapter,
    RestrictAdapters,
    StartLoad,
    portable,
)
from .shared_sleep import SharedSleeper

POLL_SECONDS = 0.0005


class SharedRunner:
    """Executes each plan on all ranks: the peers are given it first. Any failure ends the group."""

    def __init__(self, runner: Runner, peers: Peers) -> None:
        self._runner, self._peers = runner, peers
        self._arrived: Counter[tuple[int, int]] = Counter()
        self._problems: dict[tuple[int, int], str] = {}

    def submit(self, plan: StepPlan) -> Any:
        """See `Runner`. Raises RankError."""
        self._peers.write(PLAN, pack_plan(plan))
        return self._together(lambda: self._runner.submit(plan))

    def drafts(self, handle: Any) -> StepDrafts:
        """See `Runner`: every rank drafts the same. Raises RankError."""
        drafts: StepDrafts = self._together(lambda: self._runner.drafts(handle))
        return drafts

    def constrain(self, handle: Any, masks: StepMasks) -> None:
        """See `Runner`. Raises RankError."""
        self._peers.write(MASKS, pack_masks(masks))
        self._together(lambda: self._runner.constrain(handle, masks))

    def collect(self, handle: Any) -> StepResult:
        """See `Runner`. Raises RankError."""
        result: StepResult = self._together(lambda: self._runner.collect(handle))
        return result

    def start_load(self, slot: int, number: int) -> None:
        """See `Runner`."""
        self._peers.tell(StartLoad(slot, number))
        self._runner.start_load(slot, number)

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """See `Runner`: a copy has ended when it has ended on all ranks."""
        until = time.monotonic() + timeout
        while True:
            reports = self._runner.loaded()
            reports += [(told["slot"], told["number"], told["problem"]) for _, told in self._peers.take_loads()]
            ended = [(*place, self._problems.pop(place, None)) for place in map(self._note, reports) if place]
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(POLL_SECONDS)

    def forget_adapter(self, number: int) -> None:
        """See `Runner`."""
        self._peers.tell(ForgetAdapter(number))
        self._runner.forget_adapter(number)

    def _note(self, report: tuple[int, int, str | None]) -> tuple[int, int] | None:
        """The slot and the adapter, once all ranks have reported their copy."""
        slot, number, problem = report
        place = slot, number
        self._arrived[place] += 1
        if problem is not None:
            self._problems.setdefault(place, problem)
        if self._arrived[place] < self._peers.world:
            return None
        del self._arrived[place]
        return place

    def _together(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            raise self._peers.explain(error) from error


@dataclass
class SharedModel(Model):
    """`Model` on several ranks.

    peers   the other ranks
    group   this process's place among them
    """

    peers: Peers = None  # type: ignore[assignment]  # a field after those that have defaults
    group: RankGroup = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._shared = SharedRunner(self.runner, self.peers)
        self._sleeps = None if self.sleeper is None else SharedSleeper(self.sleeper, self.peers)

    @property
    def executes(self) -> Runner:
        """What plans are given to."""
        return self._shared

    @property
    def sleeps(self) -> SharedSleeper | None:
        """See `Model.sleeps`: on all ranks."""
        return self._sleeps

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> KnownAdapter:
        """See `Model.add_adapter`: on all ranks, or on none. Raises RankError too."""
        known = super().add_adapter(name, path, replace)
        self.peers.tell(AddAdapter(name, str(Path(path).resolve()), replace, known.number, known.content_hash))
        problem = next((told["problem"] for told in self.peers.wait_for("added") if told["problem"]), None)
        if problem is not None:
            self.remove_adapter(name)
            self._shared.forget_adapter(known.number)
            raise AdapterError(problem)
        return known

    def remove_adapter(self, name: str) -> int:
        """See `Model.remove_adapter`."""
        number = super().remove_adapter(name)
        self.peers.tell(RemoveAdapter(name))
        return number

    def restrict_adapters(self, roots: Sequence[str | Path]) -> None:
        """See `Model.restrict_adapters`."""
        super().restrict_adapters(roots)
        self.peers.tell(RestrictAdapters([str(root) for root in roots]))

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """See `Model.when_lost`. A thread calls it."""
        self.peers.broken = tell
        try:
            self.peers.check()
        except RankError as lost:
            tell(str(lost))

    def close(self) -> None:
        """End the other ranks."""
        self.peers.close()
        leave_group(self.group)


def load_shared(
    model: str | Path | Mapping[str, Any],
    source: ModelSource,
    adapters: Mapping[str, str | Path],
    options: LoadOptions,
    keywords: Mapping[str, Any],
    describe: Describe = describe_adapter,
) -> Model:
    """A model on as many ranks as the options say, loaded and ready; with one, in this process alone. `source` and
    `options` are what `model` and `keywords` (those of `LLM`) have come to.

    Raises what `load_model` raises, OptionError for what several ranks cannot do, and RankError when one cannot start.
    """
    world, device = options.compiler.tensor_parallel, options.device
    options = with_calibration(source, options)
    if world == 1:
        return load_model(source, adapters, options, describe)
    _check_devices(device, world)
    settings = PeerSettings(
        rank=0,
        world=world,
        device=str(device),
        model=dict(model) if isinstance(model, Mapping) else str(source.directory),
        llm=portable(keywords),
        adapters={name: str(Path(path).resolve()) for name, path in adapters.items()},
    )
    peers, group = Peers(settings), None
    try:
        peers.wait_for("started")
        group = join_group(0, world, peers.meeting, device, peers.check)
        loaded = load_model(source, adapters, options, describe)
        peers.wait_for("ready")
    except BaseException as error:
        # torch.distributed raises what follows from a rank's end; that rank says why
        lost = peers.explain(error) if isinstance(error, RuntimeError) and not isinstance(error, RankError) else None
        peers.close()
        if group is not None:
            leave_group(group)
        if lost is not None:
            raise lost from error
        raise
    return SharedModel(**vars(loaded), peers=peers, group=group)


def _check_devices(device: torch.device, world: int) -> None:
    if device.type == "cuda" and device.index + world > torch.cuda.device_count():
        raise OptionError(
            f"tensor_parallel_size={world} needs {world} GPUs from {device} on, and there are "
            f"{torch.cuda.device_count()}; lower it, or use device='cpu'"
        )
