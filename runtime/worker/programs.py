"""The programs that are ready to run, by bucket; once requests come, others are built next to the steps."""

from collections.abc import Callable, Iterable
from threading import Event, Lock
from typing import Generic, TypeVar

from ...compiler.program.program import Bucket
from ..adapters.background import Background

T = TypeVar("T")


class ReadyPrograms(Generic[T]):
    """Programs that were built and bound by a function `make`, which comes with each call: kept here, it would keep the
    owner of these programs alive. Until `build_aside` the caller waits for it.
    """

    def __init__(self) -> None:
        self._ready: dict[Bucket, T] = {}
        self._asked: set[Bucket] = set()
        self._builder: Background | None = None
        self._making = Lock()

    def get(self, bucket: Bucket, make: Callable[[Bucket], T]) -> T:
        """The bucket's program; after `build_aside` the smallest one that is ready and holds its steps, while a thread
        builds the bucket's own.
        """
        ready = self._ready.get(bucket)
        if ready is not None:
            return ready
        if self._builder is not None:
            holds = [other for other in list(self._ready) if _holds(other, bucket)]
            if holds:
                self._ask(self._builder, bucket, make)
                return self._ready[min(holds, key=lambda other: (other.tokens, other.sequences, other.lora))]
        return self._add(bucket, make)

    def build_aside(self, first: Iterable[Bucket], make: Callable[[Bucket], T]) -> None:
        """Build `first` now, which must hold every step, and from now on others on a thread of their own."""
        for bucket in first:
            self.get(bucket, make)
        self._builder = Background("programs", quiet=0.0)

    def finish(self, timeout: float) -> bool:
        """Wait for what the thread was asked for; False if that took more than `timeout` seconds."""
        return self._builder is None or self._builder.finish(timeout)

    def _add(self, bucket: Bucket, make: Callable[[Bucket], T]) -> T:
        with self._making:  # one at a time: two threads may not import torch's tracer together
            if bucket not in self._ready:
                self._ready[bucket] = make(bucket)
            return self._ready[bucket]

    def _ask(self, builder: Background, bucket: Bucket, make: Callable[[Bucket], T]) -> None:
        if bucket in self._asked:
            return  # also one that failed: the larger program goes on to serve it
        self._asked.add(bucket)

        def build(_stopped: Event) -> None:
            self._add(bucket, make)

        builder.later(build)


def _holds(ready: Bucket, wanted: Bucket) -> bool:
    """Whether a program runs another bucket's steps, padded. On the CPU one for 2 rows a sequence also runs those of 8:
    only kernels rely on how many there are.
    """
    return (
        ready.decode == wanted.decode
        and ready.verifies == wanted.verifies
        and ready.tokens >= wanted.tokens
        and ready.sequences >= wanted.sequences
        and ready.lora >= wanted.lora
    )
