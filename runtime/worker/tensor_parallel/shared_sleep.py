"""A model on several ranks that sleeps: all ranks give their memory back, and all take it again."""

from collections.abc import Callable, Iterable

from ....graphs.checkpoint import CheckpointError
from ...api.errors import CapacityError
from ...quantization.rounded_weights import RoundingError
from ..sleep import Sleeper, check_level, tags_of
from .peers import Peers
from .settings import Sleep, WakeUp

FAILURES = {kind.__name__: kind for kind in (CapacityError, CheckpointError, RoundingError, MemoryError, OSError)}
"""What a rank may fail with and go on as it was."""


class SharedSleeper:
    """See `Sleeper`. All ranks work at the same time, and each that fails stays as it was: the call may be repeated."""

    def __init__(self, sleeper: Sleeper, peers: Peers) -> None:
        self._sleeper, self._peers = sleeper, peers
        self._others_asleep: frozenset[str] = frozenset()

    @property
    def asleep(self) -> frozenset[str]:
        """What is away now on any rank."""
        return self._sleeper.asleep | self._others_asleep

    def sleep(self, level: int) -> None:
        """See `Sleeper.sleep`. Where a rank has too little host memory no rank sleeps. Raises RankError too."""
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

    def _on_all(self, order: Sleep | WakeUp, own: Callable[[], None]) -> None:
        """What a peer does too, done here: raises the first failure when all are done."""
        self._peers.tell(order)
        failure: Exception | None = None
        try:
            own()
        except tuple(FAILURES.values()) as error:
            failure = error
        told = self._peers.wait_for("slept")
        self._others_asleep = frozenset(tag for each in told for tag in each["asleep"])
        for rank, each in enumerate(told, start=1):
            if failure is None and each["kind"]:
                failure = FAILURES[each["kind"]](f"rank {rank} of {self._peers.world}: {each['problem']}")
        if failure is not None:
            raise failure
