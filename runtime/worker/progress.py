"""What a start is busy with, on stderr: bars with the program's name on a terminal, one plain line each elsewhere."""

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def progress(items: Iterable[Item], doing: str, unit: str, show: bool, total: int | None = None) -> Iterator[Item]:
    """The items, counted as they are taken; `total`: how many, for items that do not know it."""
    count = len(items) if isinstance(items, Collection) else total
    if not show or not count or not sys.stderr.isatty():
        if show and count:
            _line(f"{doing} ({count} {unit}{'s' * (count != 1)})")
        yield from items
        return
    yield from tqdm(items, desc=f"sidestream: {doing}", unit=unit, total=count, leave=False)


@contextmanager
def stage(doing: str, show: bool) -> Iterator[None]:
    """Says what goes on for as long as the block takes."""
    if not show or not sys.stderr.isatty():
        if show:
            _line(doing)
        yield
        return
    with tqdm(total=0, bar_format="{desc} ...", desc=f"sidestream: {doing}", leave=False):
        yield


def say(text: str, show: bool) -> None:
    """One line of its own."""
    if show:
        _line(text)


def _line(text: str) -> None:
    print(f"sidestream: {text}", file=sys.stderr, flush=True)
