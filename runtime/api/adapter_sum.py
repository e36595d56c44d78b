"""Weighted sums of adapters: names such as `poetry*0.7+sql*0.3`, and content hashes.

A sum's name is canonical: parts in the order of their names, without weights of 0. It cannot be an adapter's name. The
sum of one adapter with weight 1 has the adapter's name.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .errors import RequestError

MAX_PARTS = 8
MAX_WEIGHT = 100.0
SUM_PATH = "sum:"
"""Start of the location of a named sum, in place of a directory; its name follows."""
AdapterChoice = str | Mapping[str, float]
"""An adapter's name, or weights by the names of adapters."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}(@[1-9][0-9]{0,9})?")


def sum_name(weights: Iterable[tuple[Any, Any]], field: str) -> str:
    """Return the name of the sum of adapters with these weights. Raises RequestError, which names `field`."""
    parts: dict[str, float] = {}
    pairs = list(weights)
    if len(pairs) > MAX_PARTS:
        raise RequestError(f"{field} has {len(pairs)} adapters; a sum has at most {MAX_PARTS}")
    for name, weight in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"{field}: {str(name)[:140]!r} is not the name of an adapter")
        if name in parts:
            raise RequestError(f"{field} has adapter {name!r} twice; give the sum of its weights")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not abs(weight) <= MAX_WEIGHT:  # also NaN
            raise RequestError(
                f"{field}: the weight of {name!r} is {str(weight)[:40]}; it must be a number from {-MAX_WEIGHT:g} to "
                f"{MAX_WEIGHT:g}"
            )
        parts[name] = float(weight)
    kept = sorted((name, weight) for name, weight in parts.items() if weight != 0.0)
    if not kept:
        raise RequestError(f"{field} has no weight other than 0; leave it out for the base model")
    if len(kept) == 1 and kept[0][1] == 1.0:
        return kept[0][0]
    return "+".join(f"{name}*{weight!r}" for name, weight in kept)


def with_sum_names(adapter: Any) -> Any:
    """Return a call's `adapter`, one for all prompts or a list, with the names of sums in place of weights.

    Raises RequestError.
    """
    if isinstance(adapter, Mapping):
        return sum_name(adapter.items(), "adapter")
    if not isinstance(adapter, Sequence) or isinstance(adapter, str):
        return adapter
    return [
        sum_name(each.items(), f"adapter[{index}]") if isinstance(each, Mapping) else each
        for index, each in enumerate(adapter)
    ]


@lru_cache(maxsize=4096)
def sum_parts(name: str) -> tuple[tuple[str, float], ...]:
    """Return the adapters of a sum and their weights. An adapter itself is one part with weight 1."""
    if is_sum(name):
        return _parse(name)
    return ((name, 1.0),)


@lru_cache(maxsize=4096)
def is_sum(name: str) -> bool:
    """Return whether a name is that of a sum."""
    try:
        return "*" in name and sum_name(_parse(name), "adapter") == name
    except ValueError:
        return False


def _parse(name: str) -> tuple[tuple[str, float], ...]:
    pairs = (part.partition("*") for part in name.split("+"))
    return tuple((part, float(weight)) for part, _, weight in pairs)


def part_names(name: str) -> str:
    """Return the adapters of a sum without weights, such as `poetry+sql`; for metrics, which need few names."""
    return "+".join(part for part, _ in sum_parts(name))


def sum_content(parts: Iterable[tuple[str, float]]) -> str:
    """Return the content hash (hex) of a sum of adapters, given by content hashes and weights."""
    pairs = list(parts)
    if len(pairs) == 1 and pairs[0][1] == 1.0:
        return pairs[0][0]
    lines = sorted(f"{content} {weight.hex()}\n" for content, weight in pairs)
    return hashlib.sha256(f"sum 1\n{''.join(lines)}".encode()).hexdigest()
