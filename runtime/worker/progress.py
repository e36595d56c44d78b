"""Start-up progress on stderr: a bar on a terminal, one plain line otherwise."""

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from ..processes.logs import is_json, progress_line

Item = TypeVar("Item")


def progress(items: Iterable[Item], doing: str, unit: str, show: bool, total: int | None = None) -> Iterator[Item]:
    """Yield the items and count them; `total`: their number, for items without a length."""
    count = len(items) if isinstance(items, Collection) else total
    if not show or not count or not _has_bars():
        print_line(f"{doing} ({count} {unit}{'s' * (count != 1)})", bool(show and count))
        yield from items
        return
    yield from tqdm(items, desc=f"sidestream: {doing}", unit=unit, total=count, leave=False)


@contextmanager
def stage(doing: str, show: bool) -> Iterator[None]:
    """Show a text while the block runs."""
    if not show or not _has_bars():
        print_line(doing, show)
        yield
        return
    with tqdm(total=0, bar_format="{desc} ...", desc=f"sidestream: {doing}", leave=False):
        yield


def _has_bars() -> bool:
    return sys.stderr.isatty() and not is_json()


def print_line(text: str, show: bool) -> None:
    """Print a line, if `show`."""
    if show:
        print(progress_line(text, "gpu"), file=sys.stderr, flush=True)
