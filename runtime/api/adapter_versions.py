"""Versions of adapters that are updated from memory.

An update of `policy` to version 7 has the name `policy@7`, and `policy` is the newest version. So a name finds the same
adapter wherever a request names one.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from .errors import RequestError

MAX_VERSION = (1 << 31) - 1
_VERSION = re.compile(r"(?P<name>[^@]+)@(?P<version>[1-9][0-9]{0,9})")


class AdapterVersion(NamedTuple):
    """An applied update. `content`: hash of its config and tensors."""

    name: str
    version: int
    content: str


class VersionConflictError(RequestError):
    """The version of an update is not above the adapter's last one."""

    code = "version_conflict"


def version_name(name: str, version: int) -> str:
    """Return the name of a version of an adapter."""
    return f"{name}@{version}"


def split_version(name: str) -> tuple[str, int | None]:
    """Return an adapter's name and the version that `name` has; None without one."""
    match = _VERSION.fullmatch(name)
    return (name, None) if match is None else (match["name"], int(match["version"]))


def version_of(name: str) -> int:
    """Return the version that a name has; 0 without one."""
    return split_version(name)[1] or 0


def versions_of(name: str, names: Iterable[str]) -> list[int]:
    """Return the versions of an adapter in a list of names, oldest first."""
    found = [split_version(each) for each in names if each.startswith(f"{name}@")]
    return sorted(version for owner, version in found if owner == name and version is not None)


def next_version(name: str, wanted: int | None, names: Iterable[str]) -> int:
    """Return the version of an update: `wanted`, or the one after the last. Raises VersionConflictError."""
    last = max(versions_of(name, names), default=0)
    version = last + 1 if wanted is None else wanted
    if isinstance(version, bool) or not isinstance(version, int) or not 0 < version <= MAX_VERSION:
        raise RequestError(f"version={str(wanted)[:40]} must be an integer from 1 to {MAX_VERSION}, or left out")
    if version <= last:
        raise VersionConflictError(
            f"adapter {name!r} has version {last}, and version={version} is not above it; leave version out for "
            f"{last + 1}"
        )
    return version


def names_to_remove(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that a removal of `name` removes: all versions of an adapter, and then its own.

    Raises RequestError for the newest version, which `name` without a version means.
    """
    known = list(names)
    owner, version = split_version(name)
    if version is None:
        return [*(version_name(name, each) for each in versions_of(name, known)), name]
    if version == max(versions_of(owner, known), default=0):
        raise RequestError(
            f"adapter {name!r} is the newest version of {owner!r}; remove {owner!r} with all its versions"
        )
    return [name]
