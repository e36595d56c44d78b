"""The masks of many completions at once, filled by llguidance's threads; also while the caller does other things."""

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
FEW = 8
"""So many masks are filled sooner than other threads wake up."""
MOST_THREADS = 16
"""More would have few of a step's masks each, and the lexers that they need take memory."""
_chosen: int | None = None
Memory = Callable[[int, int], Int32 | None]
"""(how many masks, words of each) -> where to fill them; None where there is no room for so many."""
Output = tuple[list[int], int]
"""A completion's tokens, its prompt's first, and where its output begins."""


def empty_masks(matchers: Sequence[Matcher], count: int) -> Int32:
    """Zeros for so many masks of these matchers, of which there is at least one: as wide as llguidance writes them."""
    return np.zeros((count, max(matcher.grammar.words_known for matcher in matchers)), np.int32)


def fill_masks(matchers: Sequence[Matcher]) -> Int32:
    """Which tokens may come next in each completion: [M, W] words of 32 bits, lowest bit first.

    A matcher that takes too long fails (`failed`); so may any other that goes beyond llguidance's limits.
    """
    if not matchers:
        return np.zeros((0, 0), np.int32)
    masks = empty_masks(matchers, len(matchers))
    fill(masks, matchers, in_parallel=len(matchers) > FEW)
    return masks[:, : matchers[0].grammar.words]


def fill(masks: Int32, matchers: Sequence[Matcher], in_parallel: bool) -> None:
    """The same into `empty_masks` of as many. Python's lock is free most of the time."""
    apart = [row for row, matcher in enumerate(matchers) if matcher.suspicious]
    together = [row for row, matcher in enumerate(matchers) if not matcher.suspicious]
    begin = time.monotonic()
    if in_parallel and len(together) > 1:
        together.sort(key=lambda row: matchers[row].lexer)  # each thread begins with a part of them
        jobs = [(matchers[row].state, row) for row in together]
        try:
            _threads_for([matchers[row] for row in together]).unsafe_compute_mask_ptr(
                jobs, masks.ctypes.data, masks.strides[0], len(masks)
            )
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.exception("a fault while masks were filled together; each is filled by itself")
            apart, together = list(range(len(matchers))), []
    else:
        for row in together:
            matchers[row].fill(masks[row])
    suspect_slow([matchers[row] for row in together], time.monotonic() - begin)
    for row in apart:
        matchers[row].fill(masks[row])


def take_in(matchers: Sequence[Matcher], outputs: Sequence[Output], in_parallel: bool) -> None:
    """Let each matcher know its completion's output so far. One that this does not fit has `failed`."""
    begin = time.monotonic()
    usual: list[tuple[int, int]] = []  # with the one token that a step has
    for row, (matcher, output) in enumerate(zip(matchers, outputs, strict=True)):
        fresh = matcher.unseen(*output)
        if in_parallel and len(fresh) == 1 and not matcher.suspicious:
            usual.append((row, fresh[0]))
        else:
            matcher.take_in(fresh)
    if usual:
        usual.sort(key=lambda each: matchers[each[0]].lexer)
        jobs = [(matchers[row].state, token) for row, token in usual]
        try:
            _threads_for([matchers[row] for row, _ in usual]).consume_token_par(jobs)
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.exception("a fault while tokens were taken in together; each completion's are taken in by themselves")
            for row, _ in usual:
                tokens, start = outputs[row]
                matchers[row].begin_again(tokens[start:])
    suspect_slow(matchers, time.monotonic() - begin)


def _threads_for(matchers: Sequence[Matcher]) -> Any:
    return executor(min(fill_threads(), len({matcher.lexer for matcher in matchers})))


def suspect_slow(matchers: Sequence[Matcher], seconds: float) -> None:
    """Work on all of these took so long: if that is too long, each is timed by itself the next time."""
    if seconds > matching.SLOW_SECONDS:
        for matcher in matchers:
            matcher.suspicious = True


def fill_threads() -> int:
    """How many threads are to fill masks on this machine."""
    return _chosen or max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


def use_threads(count: int | None) -> None:
    """Have so many from now on, for constraints that are compiled from now on; None: as many as fit this machine."""
    global _chosen
    _chosen = count


@lru_cache(maxsize=MOST_THREADS)
def executor(threads: int) -> Any:
    """So many threads that fill masks in parallel, one set a process."""
    return import_llguidance().LLExecutor(threads)


class Filling:
    """Masks while they are filled. Until `wait` has returned nobody else may touch the matchers.

    outputs   what the completions have by now, for matchers that do not know it yet
    seconds   how long it took
    """

    def __init__(self, masks: Int32, matchers: Sequence[Matcher], outputs: Sequence[Output] = ()) -> None:
        self.seconds = 0.0
        self._masks, self._matchers, self._outputs = masks, matchers, outputs
        self._begun, self._done = threading.Event(), threading.Event()
        self._problem: BaseException | None = None

    def run(self, in_parallel: bool) -> None:
        """Fill them now."""
        begin = time.monotonic()
        self._begun.set()
        try:
            if self._outputs:
                take_in(self._matchers, self._outputs, in_parallel)
            fill(self._masks, self._matchers, in_parallel)
        except BaseException as error:
            self._problem = error  # for the thread that waits
        self.seconds = time.monotonic() - begin
        self._done.set()

    def wait_begun(self) -> None:
        """Let the other thread have Python's lock until it works without."""
        self._begun.wait()

    def wait(self) -> Int32:
        """The masks, of which those of matchers that have `failed` mean nothing. Raises what ends the process."""
        self._done.wait()
        if self._problem is not None:
            raise self._problem
        return self._masks


class Filler:
    """A thread that has masks filled while the caller goes on. It starts when there is work for it, and ends with
    `close` or when nothing refers to this any more.

    memory   where the masks of a step lie, if they are to lie in a certain place
    """

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self._work: SimpleQueue[Filling | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def room(self, matchers: Sequence[Matcher], count: int) -> Int32:
        """Room for so many masks of these matchers, of which there is at least one. What is there means nothing."""
        words = max(matcher.grammar.words_known for matcher in matchers)
        placed = None if self.memory is None else self.memory(count, words)
        return np.empty((count, words), np.int32) if placed is None else placed

    def begin(self, masks: Int32, matchers: Sequence[Matcher], outputs: Sequence[Output] = ()) -> Filling:
        """Begin to fill these, which are as wide as llguidance writes them; a few are filled at once, in the caller's
        thread. `outputs`: see `Filling`.
        """
        filling = Filling(masks, matchers, outputs)
        if len(matchers) <= FEW or self._closed:
            filling.run(len(matchers) > FEW)
            return filling
        if self._thread is None:
            stop = partial(self._work.put, None)
            self._thread = start_thread(_work, self._work, name="sidestream-masks", stop=stop)
            weakref.finalize(self, stop).atexit = False
        self._work.put(filling)
        filling.wait_begun()
        return filling

    def close(self) -> None:
        """End the thread after what it has begun. May be called twice; later masks are filled by the caller."""
        self._closed = True
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None


def _work(line: "SimpleQueue[Filling | None]") -> None:
    while (filling := line.get()) is not None:
        filling.run(in_parallel=True)
        del filling  # else its matchers' memory stays until there is more work
