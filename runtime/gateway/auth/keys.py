"""API keys: who may ask, for which models, and how much. A TOML file holds hashes, never keys.

    [keys.search-1]
    hash = "sha256:9f86d0818..."          # of the whole key; `sidestream keys http add` makes both
    owner = "search"
    models = ["llama", "sql-*"]           # * any characters, ? one; left out: all models
    requests_per_minute = 600             # limits that are left out do not apply
    tokens_per_minute = 200_000
    tokens_per_day = 5_000_000
    max_tokens = 4096
    admin = false                         # may load and unload adapters
    metrics = false                       # may read /metrics, which tells of all owners; an admin may
    created = 2026-01-31T09:00:00Z
    expires = 2026-12-31T00:00:00Z

A key is 256 random bits, so one round of SHA-256 is enough: there is nothing to guess, and a slow password hash would
only slow each request. A key is looked up by its hash in a dict. How long that takes depends on the hash of what was
sent, which nobody can steer towards a stored one.
"""

import hashlib
import logging
import os
import re
import secrets
import stat
import time as clock
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import re2

PREFIX = "sk-sidestream-"
MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096
MAX_PATTERNS = 256
MAX_LIMIT = 1 << 53
TICK_NS = 100_000_000
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
OWNER = re.compile(r"[A-Za-z0-9._@:/+-]{1,128}\Z")
PATTERN = re.compile(r"[A-Za-z0-9._*?/-]{1,256}\Z")
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_tokens")
_HASH = re.compile(r"sha256:[0-9a-f]{64}\Z")
_FLAGS = ("admin", "metrics")
_FIELDS = {"hash", "owner", "models", *LIMITS, *_FLAGS, "created", "expires"}

logger = logging.getLogger("sidestream.gateway")


class KeysFileError(ValueError):
    """A keys file cannot be used; the text names what is wrong and the remedy."""


@dataclass(frozen=True)
class Key:
    """One key's rights. Limits are positive integers, None: no limit; `max_tokens` is for each completion."""

    name: str
    hash: str
    owner: str
    models: tuple[str, ...] = ("*",)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_tokens: int | None = None
    admin: bool = False
    metrics: bool = False
    created: datetime | None = None
    expires: datetime | None = None
    _allowed: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_allowed", compiled(self.models))

    def allows(self, model: str) -> bool:
        """Whether a pattern covers this name of a model or adapter; takes time linear in the name."""
        return self._allowed.fullmatch(model) is not None

    def expired(self, now: datetime) -> bool:
        """Whether its time is over."""
        return self.expires is not None and now >= self.expires


def compiled(patterns: tuple[str, ...]) -> Any:
    """One RE2 expression that matches what any of these patterns covers."""
    options = re2.Options()
    options.never_nl = False
    options.dot_nl = True
    words = {"*": ".*", "?": "."}
    return re2.compile(
        "|".join("".join(words.get(letter) or re2.escape(letter) for letter in pattern) for pattern in patterns)
        or r"[^\s\S]",
        options,
    )


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """How a key is stored: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_bytes(path: Path) -> bytes:
    """A keys file's content. Raises KeysFileError for what is no regular file, is too large, or others may write."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KeysFileError(
            f"{path}: {error.strerror}; make it with `sidestream keys http add {path} --owner NAME`"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise KeysFileError(f"{path} is no regular file; name a TOML file of keys")
        if found.st_mode & 0o022:
            raise KeysFileError(
                f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):03o}) and so give themselves a key; "
                f"chmod 600 it, and look for keys that you do not know"
            )
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise KeysFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes; remove keys that expired")
    return content


def parse(content: bytes, path: Path) -> dict[str, Key]:
    """The keys of a file, by name. Raises KeysFileError, which names the key and the field."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise KeysFileError(f"{path} is no TOML: {error}") from None
    tables = document.pop("keys", {})
    if document:
        raise KeysFileError(f"{path} has {sorted(document)[0]!r}; it may hold tables [keys.NAME] only")
    if not isinstance(tables, dict) or len(tables) > MAX_KEYS:
        raise KeysFileError(f"{path}: `keys` must hold tables [keys.NAME], at most {MAX_KEYS}")
    found: dict[str, Key] = {}
    hashes: dict[str, str] = {}
    for name, table in tables.items():
        key = _key(name, table, path)
        if key.hash in hashes:
            raise KeysFileError(f"{path}: keys {hashes[key.hash]} and {name} have one hash; remove one of them")
        hashes[key.hash] = name
        found[name] = key
    return found


def _key(name: str, table: Any, path: Path) -> Key:
    def wrong(what: str) -> KeysFileError:
        return KeysFileError(f"{path}, key {name[:80]!r}: {what}")

    if not NAME.match(name):
        raise wrong("a key's name has 1 to 64 letters, digits, underscores or hyphens")
    if not isinstance(table, dict):
        raise wrong(f"write it as a table, [keys.{name}]")
    unknown = sorted(table.keys() - _FIELDS)
    if unknown:
        raise wrong(f"{unknown[0]!r} is not known; fields are {', '.join(sorted(_FIELDS))}")
    for required in ("hash", "owner"):
        if not isinstance(table.get(required), str):
            raise wrong(f"{required} is missing or no string")
    if not _HASH.match(table["hash"]):
        raise wrong("hash must be sha256: and 64 hexadecimal digits, as `sidestream keys http add` writes it")
    if not OWNER.match(table["owner"]):
        raise wrong("owner has 1 to 128 letters, digits or . _ @ : / + -")
    models = table.get("models", ["*"])
    if (
        not isinstance(models, list)
        or len(models) > MAX_PATTERNS
        or not all(isinstance(pattern, str) and PATTERN.match(pattern) for pattern in models)
    ):
        raise wrong(f"models must be a list of up to {MAX_PATTERNS} names, in which * and ? stand for characters")
    for limit in LIMITS:
        value = table.get(limit, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LIMIT:
            raise wrong(f"{limit} must be an integer from 1 on; leave it out for no limit")
    for flag in _FLAGS:
        if not isinstance(table.get(flag, False), bool):
            raise wrong(f"{flag} must be true or false")
    moments = {which: _moment(table.get(which), which, wrong) for which in ("created", "expires")}
    return Key(**(table | moments | {"name": name, "models": tuple(models)}))


def _moment(value: Any, which: str, wrong: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC)
    if value is not None:
        raise wrong(f"{which} must be a date, or a date with a time, without quotes: 2026-12-31T00:00:00Z")
    return None


class KeyBook:
    """The keys of a file, read again when it changes.

    Every look-up asks the file system whether the file changed (its inode, time, size and mode), so a key that was
    revoked fails at its next request. A file that is broken, missing or writable by others leaves the keys as they
    were: `problem` says why ("" when all is well), `failures` counts such changes, and each is logged.

    Raises KeysFileError when it is made from a file that cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.failures = 0
        self.loads = 0
        self._signature = self._look()
        self._content = read_bytes(path)
        self._take(parse(self._content, path))

    @property
    def keys(self) -> Mapping[str, Key]:
        """By name, as last read."""
        return self._keys

    def find(self, key: str) -> Key | None:
        """The entry of a key that somebody sent, also when it has expired; None: there is none."""
        self.refresh()
        return self._by_hash.get(hash_of(key))

    def refresh(self) -> None:
        """Read the file again if it changed."""
        signature = self._look()
        if signature == self._signature and self._settled(signature):
            return
        self._signature = signature
        try:
            content = read_bytes(self.path)
            keys = None if content == self._content else parse(content, self.path)
        except KeysFileError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                self.failures += 1
                logger.warning("the keys stay as they were: %s", error)
            return
        self.problem = ""
        if keys is not None:
            self._content = content
            self._take(keys)

    def _take(self, keys: dict[str, Key]) -> None:
        self._keys = keys
        self._by_hash = {key.hash: key for key in keys.values()}
        self.loads += 1

    def _look(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode

    @staticmethod
    def _settled(signature: tuple[int, ...]) -> bool:
        """Whether a later change would show: within one tick of the file system's clock two changes look like one."""
        return not signature or abs(clock.time_ns() - signature[0]) > TICK_NS
