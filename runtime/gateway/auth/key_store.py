"""API keys: owners, allowed models, and limits. A TOML file holds hashes, never keys.

    [keys.search-1]
    hash = "sha256:9f86d0818..."          # of the whole key; `sidestream keys http add` creates both
    owner = "search"
    models = ["llama", "sql-*"]           # * any characters, ? one; default: all models
    requests_per_minute = 600             # default of all limits: none
    tokens_per_minute = 200_000
    tokens_per_day = 5_000_000
    max_tokens = 4096
    admin = false                         # may load and unload adapters
    metrics = false                       # may read /metrics, which covers all owners; admins always may
    created = 2026-01-31T09:00:00Z
    expires = 2026-12-31T00:00:00Z

A key is 256 random bits, so one round of SHA-256 is enough: guessing is hopeless, and a slow password hash would only
slow requests. A key is looked up by its hash in a dict. The time of the lookup reveals nothing useful, since clients
cannot choose hashes that are close to a stored one.
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
from functools import cached_property
from pathlib import Path
from typing import Any

import re2

from .limits import Limits

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
    """A keys file cannot be used. The message explains the problem and the remedy."""


@dataclass(frozen=True)
class Key:
    """A key's permissions and limits. Limits are positive, None: no limit. `max_tokens` applies to each completion."""

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
        object.__setattr__(self, "_allowed", compile_patterns(self.models))

    @cached_property
    def limits(self) -> Limits:
        """Its limits on requests and tokens."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day)

    def allows(self, model: str) -> bool:
        """Return whether a pattern matches the name of a model or adapter, in time linear in its length."""
        return self._allowed.fullmatch(model) is not None

    def expired(self, now: datetime) -> bool:
        """Return whether the key has expired."""
        return self.expires is not None and now >= self.expires


def compile_patterns(patterns: tuple[str, ...]) -> Any:
    """Return an RE2 expression that matches if any of the patterns does."""
    options = re2.Options()
    options.never_nl = False
    options.dot_nl = True
    wildcards = {"*": ".*", "?": "."}
    return re2.compile(
        "|".join("".join(wildcards.get(letter) or re2.escape(letter) for letter in pattern) for pattern in patterns)
        or r"[^\s\S]",
        options,
    )


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Return the stored form of a key: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Read a keys file. Raises KeysFileError if it is not a regular file, too large, or writable by others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KeysFileError(
            f"{path}: {error.strerror}; create it with `sidestream keys http add {path} --owner NAME`"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise KeysFileError(f"{path} is not a regular file; give a TOML file of keys")
        if info.st_mode & 0o022:
            raise KeysFileError(
                f"other users may write to {path} (mode {stat.S_IMODE(info.st_mode):03o}) and could add keys; "
                f"chmod 600 it, and look for unknown keys"
            )
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise KeysFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes; remove expired keys")
    return content


def parse(content: bytes, path: Path) -> dict[str, Key]:
    """Return the keys of a file by name. Raises KeysFileError that names the key and the field."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise KeysFileError(f"{path} is not valid TOML: {error}") from None
    tables = document.pop("keys", {})
    if document:
        raise KeysFileError(f"{path} has {sorted(document)[0]!r}; only tables [keys.NAME] are allowed")
    if not isinstance(tables, dict) or len(tables) > MAX_KEYS:
        raise KeysFileError(f"{path}: `keys` must contain tables [keys.NAME], at most {MAX_KEYS}")
    keys: dict[str, Key] = {}
    hashes: dict[str, str] = {}
    for name, table in tables.items():
        key = _key(name, table, path)
        if key.hash in hashes:
            raise KeysFileError(f"{path}: keys {hashes[key.hash]} and {name} have the same hash; remove one")
        hashes[key.hash] = name
        keys[name] = key
    return keys


def _key(name: str, table: Any, path: Path) -> Key:
    def invalid(reason: str) -> KeysFileError:
        return KeysFileError(f"{path}, key {name[:80]!r}: {reason}")

    if not NAME.match(name):
        raise invalid("the name must have 1 to 64 letters, digits, underscores or hyphens")
    if not isinstance(table, dict):
        raise invalid(f"write it as a table, [keys.{name}]")
    unknown = sorted(table.keys() - _FIELDS)
    if unknown:
        raise invalid(f"{unknown[0]!r} is unknown; allowed fields are {', '.join(sorted(_FIELDS))}")
    for required in ("hash", "owner"):
        if not isinstance(table.get(required), str):
            raise invalid(f"{required} is missing or not a string")
    if not _HASH.match(table["hash"]):
        raise invalid("hash must be sha256: and 64 hexadecimal digits, as `sidestream keys http add` writes it")
    if not OWNER.match(table["owner"]):
        raise invalid("owner must have 1 to 128 letters, digits or . _ @ : / + -")
    models = table.get("models", ["*"])
    if (
        not isinstance(models, list)
        or len(models) > MAX_PATTERNS
        or not all(isinstance(pattern, str) and PATTERN.match(pattern) for pattern in models)
    ):
        raise invalid(f"models must be a list of up to {MAX_PATTERNS} names; * and ? are wildcards")
    for limit in LIMITS:
        value = table.get(limit, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LIMIT:
            raise invalid(f"{limit} must be an integer of at least 1; omit it for no limit")
    for flag in _FLAGS:
        if not isinstance(table.get(flag, False), bool):
            raise invalid(f"{flag} must be true or false")
    times = {field: _datetime(table.get(field), field, invalid) for field in ("created", "expires")}
    return Key(**(table | times | {"name": name, "models": tuple(models)}))


def _datetime(value: Any, field: str, invalid: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC)
    if value is not None:
        raise invalid(f"{field} must be a date, or a date with a time, without quotes: 2026-12-31T00:00:00Z")
    return None


class KeyStore:
    """The keys of a file, reloaded when it changes.

    Every lookup checks the file's inode, time, size and mode, so a revoked key fails at its next request. If the file
    becomes invalid, missing or writable by others, the keys stay as they were: `problem` is the reason ("": none),
    `failures` counts such changes, and each is logged.

    Raises KeysFileError if the file cannot be used at the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.failures = 0
        self.loads = 0
        self._signature = self._stat()
        self._content = read_bytes(path)
        self._set_keys(parse(self._content, path))

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys by name."""
        return self._keys

    def find(self, key: str) -> Key | None:
        """Return the entry of a key, even an expired one; None: unknown key."""
        self.refresh()
        return self._by_hash.get(hash_of(key))

    def refresh(self) -> None:
        """Reload the file if it changed."""
        signature = self._stat()
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
                logger.warning("keys not reloaded: %s", error)
            return
        self.problem = ""
        if keys is not None:
            self._content = content
            self._set_keys(keys)

    def _set_keys(self, keys: dict[str, Key]) -> None:
        self._keys = keys
        self._by_hash = {key.hash: key for key in keys.values()}
        self.loads += 1

    def _stat(self) -> tuple[int, ...]:
        try:
            info = os.stat(self.path)
        except OSError:
            return ()
        return info.st_mtime_ns, info.st_ino, info.st_size, info.st_mode

    @staticmethod
    def _settled(signature: tuple[int, ...]) -> bool:
        """Return whether a later change would be visible: two changes within one clock tick have the same time."""
        return not signature or abs(clock.time_ns() - signature[0]) > TICK_NS
