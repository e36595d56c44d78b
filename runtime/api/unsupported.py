"""Options of other servers that Sidestream does not have: values without an effect are accepted, others are refused."""

from typing import Any, NamedTuple


class Unsupported(NamedTuple):
    """Accepted values, which have no effect as None does, and the remedy for all others."""

    accepted: tuple[Any, ...]
    remedy: str


ANY: Any = object()
"""In `accepted`: every value."""


def has_no_effect(option: Unsupported, value: Any) -> bool:
    """Return whether a value of an unsupported option is accepted because it has no effect."""
    return value is None or any(each is ANY or _same(value, each) for each in option.accepted)


def _same(value: Any, accepted: Any) -> bool:
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    return bool(value == accepted)
