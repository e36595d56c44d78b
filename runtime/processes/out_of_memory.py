"""Recognise errors of a process that ran out of memory, whatever library raised them."""

import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_NEAR_LIMIT = 0.8
"""Share of the address-space limit above which it counts as reached."""

_MESSAGES = (
    "annot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to map segment",
    "std::bad_alloc",
)
"""Error texts of the loader, torch, Python's threads and C++."""


def out_of_memory(problem: BaseException) -> str | None:
    """Return a message for the user if memory or address space ran out, None for any other error."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not any(map(_is_out_of_memory, _causes(problem))) and not _is_near_limit(soft, problem):
        return None
    if soft == resource.RLIM_INFINITY:
        return "memory ran out: free some, serve a smaller model, or lower max_model_len, max_num_seqs or max_cpu_loras"
    return (
        f"the address space of this process is limited to {soft >> 20} MiB, and that is used up: raise the limit "
        "(`ulimit -v unlimited`), or serve a smaller model"
    )


def _is_near_limit(limit: int, problem: BaseException) -> bool:
    """Return whether an import failed near the address-space limit, without an out-of-memory error."""
    if limit == resource.RLIM_INFINITY or not isinstance(
        problem, (ImportError, AttributeError, NameError, SystemError)
    ):
        return False
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    peak = re.search(r"VmPeak:\s+(\d+) kB", status)
    return peak is not None and int(peak[1]) << 10 > _NEAR_LIMIT * limit


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
        or any(text in str(problem) for text in _MESSAGES)
    )
