"""Faults that mean that a process may not have more memory, whatever raised them."""

import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path

NEAR = 0.8
"""Of the limit, from where on it is taken to be reached."""

_WORDS = (
    "annot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to map segment",
    "std::bad_alloc",
)
"""Of the loader, torch, Python's threads and C++."""


def out_of_memory(problem: BaseException) -> str | None:
    """Return what to tell a user if memory or address space ran out; None for any other fault."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not any(map(_is_out_of_memory, _causes(problem))) and not _is_at(soft, problem):
        return None
    if soft == resource.RLIM_INFINITY:
        return "memory ran out: free some, serve a smaller model, or lower max_model_len, max_num_seqs or max_cpu_loras"
    return (
        f"the address space of this process is limited to {soft >> 20} MiB, and that is used up: raise the limit "
        "(`ulimit -v unlimited`), or serve a smaller model"
    )


def _is_at(limit: int, problem: BaseException) -> bool:
    """Whether a module is broken because something in it was refused memory, and did not say so."""
    if limit == resource.RLIM_INFINITY or not isinstance(
        problem, (ImportError, AttributeError, NameError, SystemError)
    ):
        return False
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    peak = re.search(r"VmPeak:\s+(\d+) kB", status)
    return peak is not None and int(peak[1]) << 10 > NEAR * limit


def _causes(problem: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        seen.add(id(problem))
        yield problem
        problem = problem.__cause__ or problem.__context__


def _is_out_of_memory(problem: BaseException) -> bool:
    return (
        isinstance(problem, MemoryError)
        or (isinstance(problem, OSError) and problem.errno == errno.ENOMEM)
        or any(word in str(problem) for word in _WORDS)
    )
