"""Masks of many completions, filled by llguidance's threads, also while the caller does other work."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...processes.threads import start_thread
from . import matcher as matching
from .matcher import Int32, Matcher, is_fault
from .vocabulary import import_llguidance

_log = logging.getLogger(__name__)
FEW = 8  # up to this many masks are filled before other threads would wake up
MAX_THREADS = 16  # more threads would have few masks of a step each, and their lexers take memory
_chosen: int | None = None
Memory = Callable[[int, int], Int32 | None]  # (number of masks, words of each) -> buffer, None if there is no room
Output = tuple[list[int], int]  # a completion's tokens, prompt first, and the index of its first output token


def empty_masks(matchers: Sequence[Matcher], count: int) -> Int32:
    """Return zeros for `count` masks of these (one or more) matchers, as wide as llguidance writes them."""
    return np.zeros((count, max(matcher.grammar.llguidance_words for matcher in matchers)), np.int32)


def fill(masks: Int32, matchers: Sequence[Matcher], in_parallel: bool) -> None:
    """Fill masks in `empty_masks` of as many matchers. The GIL is released most of the time."""
    apart = [row for row, matcher in enumerate(matchers) if matcher.suspicious]
    together = [row for row, matcher in enumerate(matchers) if not matcher.suspicious]
    begin = time.monotonic()
    if in_parallel and len(together) > 1:
        together.sort(key=lambda row: matchers[row].lexer)  # each thread starts with a part of them
        jobs = [(matchers[row].state, row) for row in together]
        try:
            _threads_for([matchers[row] for row in together]).unsafe_compute_mask_ptr(
                jobs, masks.ctypes.data, masks.strides[0], len(masks)
            )
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.exception("filling masks together failed; filling each alone")
            apart, together = list(range(len(matchers))), []
    else:
        for row in together:
            matchers[row].fill(masks[row])
    time_if_slow([matchers[row] for row in together], time.monotonic() - begin)
    for row in apart:
        matchers[row].fill(masks[row])


def consume_outputs(matchers: Sequence[Matcher], outputs: Sequence[Output], in_parallel: bool) -> None:
    """Advance each matcher by its completion's new output tokens. A matcher that rejects them has `failed`."""
    begin = time.monotonic()
    usual: list[tuple[int, int]] = []  # with one new token
    for row, (matcher, output) in enumerate(zip(matchers, outputs, strict=True)):
        fresh = matcher.new_tokens(*output)
        if in_parallel and len(fresh) == 1 and not matcher.suspicious:
            usual.append((row, fresh[0]))
        else:
            matcher.consume(fresh)
    if usual:
        usual.sort(key=lambda each: matchers[each[0]].lexer)
        jobs = [(matchers[row].state, token) for row, token in usual]
        try:
            _threads_for([matchers[row] for row, _ in usual]).consume_token_par(jobs)
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.exception("consuming tokens together failed; consuming each completion's alone")
            for row, _ in usual:
                tokens, start = outputs[row]
                matchers[row].restart(tokens[start:])
    time_if_slow(matchers, time.monotonic() - begin)


def _threads_for(matchers: Sequence[Matcher]) -> Any:
    return executor(min(fill_threads(), len({matcher.lexer for matcher in matchers})))


def time_if_slow(matchers: Sequence[Matcher], seconds: float) -> None:
    """Time these matchers one by one from now on if their common work took too long."""
    if seconds > matching.SLOW_SECONDS:
        for matcher in matchers:
            matcher.suspicious = True


def fill_threads() -> int:
    """Return the number of threads that fill masks on this machine."""
    return _chosen or max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


def use_threads(count: int | None) -> None:
    """Set the number of threads for constraints compiled from now on; None: a number that suits this machine."""
    global _chosen
    _chosen = count


@lru_cache(maxsize=MAX_THREADS)
def executor(threads: int) -> Any:
    """Return the thread pool of `threads` threads, one per process."""
    return import_llguidance().LLExecutor(threads)


class PendingMasks:
    """Masks in progress. Do not use the matchers until `wait` has returned.

    outputs   completions' outputs to consume first
    seconds   duration of the work
    """

    def __init__(self, masks: Int32, matchers: Sequence[Matcher], outputs: Sequence[Output] = ()) -> None:
        self.seconds = 0.0
        self._masks, self._matchers, self._outputs = masks, matchers, outputs
        self._started, self._done = threading.Event(), threading.Event()
        self._problem: BaseException | None = None

    def run(self, in_parallel: bool) -> None:
        """Fill the masks now."""
        begin = time.monotonic()
        self._started.set()
        try:
            if self._outputs:
                consume_outputs(self._matchers, self._outputs, in_parallel)
            fill(self._masks, self._matchers, in_parallel)
        except BaseException as error:
            self._problem = error  # raised in the waiting thread
        self.seconds = time.monotonic() - begin
        self._done.set()

    def wait_started(self) -> None:
        """Block until the other thread has started, so that it can acquire the GIL."""
        self._started.wait()

    def wait(self) -> Int32:
        """Return the masks; those of matchers that have `failed` are undefined. Raises the run's error."""
        self._done.wait()
        if self._problem is not None:
            raise self._problem
        return self._masks


class MaskFiller:
    """A thread that fills masks while the caller does other work.

    The thread starts on demand, and ends with `close` or when this object is garbage. `memory` allocates the masks of a
    step in buffers of the caller.
    """

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self._work: SimpleQueue[PendingMasks | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def room(self, matchers: Sequence[Matcher], count: int) -> Int32:
        """Return an uninitialised buffer for `count` masks of these (one or more) matchers."""
        words = max(matcher.grammar.llguidance_words for matcher in matchers)
        placed = None if self.memory is None else self.memory(count, words)
        return np.empty((count, words), np.int32) if placed is None else placed

    def begin(self, masks: Int32, matchers: Sequence[Matcher], outputs: Sequence[Output] = ()) -> PendingMasks:
        """Start to fill masks that are as wide as llguidance writes them. The caller's thread fills a small number."""
        filling = PendingMasks(masks, matchers, outputs)
        if len(matchers) <= FEW or self._closed:
            filling.run(len(matchers) > FEW)
            return filling
        if self._thread is None:
            stop = partial(self._work.put, None)
            self._thread = start_thread(_work, self._work, name="sidestream-masks", stop=stop)
            weakref.finalize(self, stop).atexit = False
        self._work.put(filling)
        filling.wait_started()
        return filling

    def close(self) -> None:
        """End the thread after its current work. The caller's thread fills later masks. May be called twice."""
        self._closed = True
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None


def _work(line: "SimpleQueue[PendingMasks | None]") -> None:
    while (filling := line.get()) is not None:
        filling.run(in_parallel=True)
        del filling  # release its matchers before the next wait
