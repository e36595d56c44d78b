"""Adds keys to a keys file and revokes them. Everything else in the file, comments included, is kept.

A change takes a lock (`FILE.lock`) and atomically replaces the file. A new file has mode 0600.
"""

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from .key_store import LIMITS, MAX_FILE_BYTES, Key, KeysFileError, hash_of, new_key, parse, read_bytes

_HEADER = "# API keys of a Sidestream gateway: hashes only. Edit with `sidestream keys http`, or by hand.\n"
MAX_LISTED = 10
_TABLE = re.compile(r"\s*\[")


def add(path: Path, entry: Key) -> str:
    """Add `entry` with the hash of a new key. Returns the key, which is not stored.

    Raises KeysFileError if the file is invalid or has an entry of this name, or if a value is not allowed.
    """
    key = new_key()
    with _locked(path) as (content, write):
        if entry.name in parse(content, path):
            raise KeysFileError(f"{path} already has a key {entry.name!r}; choose another name, or revoke that key")
        text = (content.decode() or _HEADER).rstrip("\n") + "\n\n" + table(replace(entry, hash=hash_of(key)))
        parse(text.encode(), path)
        write(text)
    return key


def revoke(path: Path, name_or_owner: str) -> Key:
    """Remove a key's entry and return it. Gateways refuse the key from its next request on.

    name_or_owner   the key's name, or an owner with only one key

    Raises KeysFileError if no key or several match, or if the entry is not a separate table.
    """
    if not path.exists():
        raise KeysFileError(f"{path}: no such file")
    with _locked(path) as (content, write):
        keys = parse(content, path)
        name = _name_of(name_or_owner, keys, path)
        text = _without(content.decode(), name)
        if parse(text.encode(), path) != {other: key for other, key in keys.items() if other != name}:
            raise KeysFileError(f"{path}: key {name!r} is not a separate table [keys.{name}]; remove it with an editor")
        write(text)
    return keys[name]


def _name_of(name_or_owner: str, keys: dict[str, Key], path: Path) -> str:
    """Return the name of the key with this name or owner."""
    owned = [name for name, key in keys.items() if key.owner == name_or_owner]
    if name_or_owner in keys or len(owned) == 1:
        return name_or_owner if name_or_owner in keys else owned[0]
    if owned:
        raise KeysFileError(
            f"{path}: owner {name_or_owner!r} has {len(owned)} keys; give one of their names: "
            f"{', '.join(owned[:MAX_LISTED])}{', ...' if len(owned) > MAX_LISTED else ''}"
        )
    shown = [f"{name} of {key.owner}" for name, key in list(keys.items())[:MAX_LISTED]]
    existing = f"its keys are {', '.join(shown)}" if shown else "it has no keys"
    raise KeysFileError(
        f"{path} has no key {name_or_owner!r}, and no owner of that name; {existing}"
        f"{', ...' if len(keys) > MAX_LISTED else ''} (`sidestream keys http list {path}`)"
    )


def table(key: Key) -> str:
    """Return an entry as TOML."""
    values: dict[str, Any] = {"hash": key.hash, "owner": key.owner}
    if key.models != ("*",):
        values["models"] = list(key.models)
    values |= {limit: getattr(key, limit) for limit in LIMITS if getattr(key, limit) is not None}
    values |= {flag: True for flag in ("admin", "metrics") if getattr(key, flag)}
    values |= {field: value for field in ("created", "expires") if (value := getattr(key, field)) is not None}
    lines = [f"{name} = {_to_toml(value)}" for name, value in values.items()]
    return "\n".join([f"[keys.{key.name}]", *lines, ""])


def _to_toml(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds").replace("+00:00", "Z")
    return json.dumps(value)  # the strings, lists, integers and booleans of a key are the same in TOML


def _without(text: str, name: str) -> str:
    """Return the file's text without the table `[keys.NAME]`."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if _TABLE.match(line) and "=" not in line.partition("#")[0]:
            inside = re.match(rf"\s*\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]", line) is not None
        if not inside:
            kept.append(line)
    return "".join(kept)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Lock the file. Yields its content (b"" if it does not exist) and a function that replaces it."""
    path = Path(os.path.realpath(path))  # keep symbolic links
    descriptor = os.open(
        path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        content = read_bytes(path) if path.exists() else b""
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
        yield content, lambda text: _replace(path, text.encode(), mode)
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes, mode: int) -> None:
    if len(content) > MAX_FILE_BYTES:
        raise KeysFileError(f"{path} would be larger than {MAX_FILE_BYTES} bytes; remove keys that expired")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            raise KeysFileError(
                f"{path} cannot be written ({error.strerror}) and is unchanged: free disk space, or check permissions"
            ) from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
