"""Numbers of adapters and of their weighted sums. Imports no torch, because the batcher uses it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from ..api.adapter_sum import sum_content, sum_parts
from ..api.errors import RequestError
from ..engine.options import MAX_RANK

FIRST_SUM_NUMBER = 1 << 30
"""Sums have numbers of their own, which no adapter reaches."""
MAX_ADAPTER_SUMS = 64


class SumPart(NamedTuple):
    """An adapter of an engine. `obstacle`: why it cannot be part of a sum, "" if it can."""

    number: int
    rank: int
    content: str
    obstacle: str = ""


@dataclass(frozen=True)
class _Sum:
    number: int
    parts: tuple[int, ...]  # numbers of adapters


class AdapterNumbers(Mapping[str, int]):
    """Name -> number, for the scheduler. A sum is made when its number is looked up.

    Sums are kept by content, so that equal ones share a number; the least recently used ones are forgotten.

    numbers     adapters by name
    find        returns an adapter by name; raises RequestError for an unknown one
    compose     registers a sum by its number, adapters with weights, and content, before a load of it
    forget      frees a number when its requests have ended
    max_rank    LoRA rank of the slots
    rank_option spelling of the option that sets it, up to the value
    maximum     number of sums to keep
    named       name -> name of the sum for which it stands
    """

    def __init__(
        self,
        numbers: Mapping[str, int],
        find: Callable[[str], SumPart],
        compose: Callable[[int, Sequence[tuple[int, float]], str], None],
        forget: Callable[[int], None],
        max_rank: int,
        rank_option: str = "max_lora_rank=",
        maximum: int = MAX_ADAPTER_SUMS,
        named: Mapping[str, str] | None = None,
    ) -> None:
        self._numbers, self._find, self._compose, self._forget = numbers, find, compose, forget
        self._max_rank, self._rank_option, self._maximum = max_rank, rank_option, maximum
        self.named: Mapping[str, str] = {} if named is None else named
        self._sums: OrderedDict[str, _Sum] = OrderedDict()
        self._next = count(FIRST_SUM_NUMBER)

    def __getitem__(self, name: str) -> int:
        """Return the number of an adapter or a sum. Raises KeyError, and RequestError for a sum that cannot be made."""
        if name in self._numbers:
            return self._numbers[name]
        parts = self.parts(name)
        if parts == ((name, 1.0),):
            raise KeyError(name)
        self.check(name)
        found = [(self._find(part), weight) for part, weight in parts]
        if len(found) == 1 and found[0][1] == 1.0:
            return found[0][0].number
        content = sum_content((part.content, weight) for part, weight in found)
        made = self._sums.get(content)
        if made is None:
            made = _Sum(next(self._next), tuple(part.number for part, _ in found))
            self._compose(made.number, [(part.number, weight) for part, weight in found], content)
            self._sums[content] = made
            if len(self._sums) > self._maximum:
                self._forget(self._sums.popitem(last=False)[1].number)
        self._sums.move_to_end(content)
        return made.number

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def parts(self, name: str) -> tuple[tuple[str, float], ...]:
        """Return the adapters of a sum, also of a named one, and their weights."""
        return sum_parts(self.named.get(name, name))

    def check(self, name: str) -> None:
        """Raise RequestError for a sum that cannot be made from its adapters."""
        parts = self.parts(name)
        if len(parts) == 1 and parts[0][1] == 1.0:
            return
        found = {part: self._find(part) for part, _ in parts}
        for part, adapter in found.items():
            if adapter.obstacle:
                raise RequestError(f"adapter {part!r} cannot be part of a sum: {adapter.obstacle}; leave it out")
        rank = sum(adapter.rank for adapter in found.values())
        if rank > self._max_rank:
            ranks = " + ".join(f"{adapter.rank} of {part!r}" for part, adapter in found.items())
            remedy = f"start with {self._rank_option}{rank}" if rank <= MAX_RANK else f"at most {MAX_RANK} is possible"
            raise RequestError(
                f"the sum of adapters has rank {rank} ({ranks}), but adapter slots have rank {self._max_rank}; "
                f"{remedy}, or leave adapters out"
            )

    def content(self, name: str) -> str:
        """Return the content hash of an adapter or a sum. Raises RequestError for an unknown adapter."""
        return sum_content((self._find(part).content, weight) for part, weight in self.parts(name))

    def rank(self, name: str) -> int:
        """Return the rank of an adapter or a sum. Raises RequestError for an unknown adapter."""
        return sum(self._find(part).rank for part, _ in self.parts(name))

    def existing(self, name: str) -> int | None:
        """Return the number of a sum if it is made. Raises RequestError for an unknown adapter."""
        made = self._sums.get(self.content(name))
        return None if made is None else made.number

    def sums_with(self, number: int) -> list[int]:
        """Return the numbers of the sums that have an adapter as a part."""
        return [made.number for made in self._sums.values() if number in made.parts]
