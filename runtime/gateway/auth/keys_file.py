"""Changes a keys file: adds a key, or takes one away. What people wrote into it, comments included, stays.

A change is made under a lock (`FILE.lock`) and written to a new file that takes the old one's place, so a reader finds
the whole old file or the whole new one. A new file has mode 0600.
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

from .keys import LIMITS, MAX_FILE_BYTES, Key, KeysFileError, hash_of, new_key, parse, read_bytes

_HEADER = "# API keys of a Sidestream gateway: hashes, never keys. `sidestream keys http add|list|revoke` change it; so may you.\n"
MAX_LISTED = 10
_TABLE = re.compile(r"\s*\[")


def add(path: Path, entry: Key) -> str:
    """Adds `entry` with a new key, whose hash takes the place of entry's. Returns the key, which is stored nowhere.

    Raises KeysFileError when the file is broken or has an entry of this name, or for a value that no entry may have.
    """
    key = new_key()
    with _changing(path) as (content, write):
        if entry.name in parse(content, path):
            raise KeysFileError(f"{path} has a key {entry.name!r} already; choose another name, or revoke that key")
        text = (content.decode() or _HEADER).rstrip("\n") + "\n\n" + table(replace(entry, hash=hash_of(key)))
        parse(text.encode(), path)
        write(text)
    return key


def revoke(path: Path, asked: str) -> Key:
    """Takes one key's entry away and returns it; a gateway refuses the key from its next request on.

    `asked`: the key's name, or an owner who has one key. Raises KeysFileError, which lists the keys in question, when
    there is none or several, or the entry is not written as a table of its own.
    """
    if not path.exists():
        raise KeysFileError(f"{path}: there is no such file")
    with _changing(path) as (content, write):
        keys = parse(content, path)
        name = _name_of(asked, keys, path)
        text = _without(content.decode(), name)
        if parse(text.encode(), path) != {other: key for other, key in keys.items() if other != name}:
            raise KeysFileError(
                f"{path}: key {name!r} is not written as a table [keys.{name}]; remove it with an editor"
            )
        write(text)
    return keys[name]


def _name_of(asked: str, keys: dict[str, Key], path: Path) -> str:
    """The name of the key that is asked for by name or by owner."""
    owned = [name for name, key in keys.items() if key.owner == asked]
    if asked in keys or len(owned) == 1:
        return asked if asked in keys else owned[0]
    if owned:
        raise KeysFileError(
            f"{path}: owner {asked!r} has {len(owned)} keys; name one of them: {', '.join(owned[:MAX_LISTED])}"
            f"{', ...' if len(owned) > MAX_LISTED else ''}"
        )
    shown = [f"{name} of {key.owner}" for name, key in list(keys.items())[:MAX_LISTED]]
    there = f"its keys are {', '.join(shown)}" if shown else "it has none"
    raise KeysFileError(
        f"{path} has no key {asked!r}, and no owner of that name; {there}{', ...' if len(keys) > MAX_LISTED else ''} "
        f"(`sidestream keys http list {path}`)"
    )


def table(key: Key) -> str:
    """An entry as TOML."""
    values: dict[str, Any] = {"hash": key.hash, "owner": key.owner}
    if key.models != ("*",):
        values["models"] = list(key.models)
    values |= {limit: getattr(key, limit) for limit in LIMITS if getattr(key, limit) is not None}
    values |= {flag: True for flag in ("admin", "metrics") if getattr(key, flag)}
    values |= {which: moment for which in ("created", "expires") if (moment := getattr(key, which)) is not None}
    lines = [f"{name} = {_written(value)}" for name, value in values.items()]
    return "\n".join([f"[keys.{key.name}]", *lines, ""])


def _written(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds").replace("+00:00", "Z")
    return json.dumps(value)  # what a key's strings, lists, integers and booleans look like in TOML as well


def _without(text: str, name: str) -> str:
    """The lines of a file without those from `[keys.NAME]` to the next table."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if _TABLE.match(line) and "=" not in line.partition("#")[0]:
            inside = re.match(rf"\s*\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]", line) is not None
        if not inside:
            kept.append(line)
    return "".join(kept)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[tuple[bytes, Any]]:
    """The file's content ("" where there is none), and what writes another, while nobody else changes it."""
    path = Path(os.path.realpath(path))  # a link stays one
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
                f"{path} cannot be written ({error.strerror}), and is as it was: free space there, or check permissions"
            ) from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
