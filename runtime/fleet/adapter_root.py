"""The adapters of a whole fleet: each folder below a root is one. The root is a directory that all hosts have, or a URL
that fsspec reads (`s3://bucket/adapters` with s3fs installed, and so on).

A folder is looked at by its files' sizes and times, which says that it may have changed; whether it is another version
says the engine that loads it, by the hash of its content.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ...compiler.program.cache_folder import cache_directory
from ..gateway.router.catalogue import Offer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 16 << 30
MAX_ADAPTERS = 100_000
COPY_BYTES = 1 << 22
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True)
class _Seen:
    stamp: str
    offer: Offer


class AdapterRoot:
    """`place`: a directory or a URL. `look` finds what is there now; folders that are no adapters are passed over.

    Raises ValueError for a URL whose file system is not installed.
    """

    def __init__(self, place: str) -> None:
        self.place, self.remote = place, is_remote(place)
        try:
            self._files, self._root = _open(place)
        except (ImportError, ValueError) as error:
            raise ValueError(f"adapters-root = {place!r} cannot be read: {error}") from None
        self._flat = not isinstance(self._files, LocalFileSystem)
        self._seen: dict[str, _Seen] = {}

    def look(self) -> Mapping[str, Offer]:
        """Name -> what is there. Raises OSError for a root that cannot be read."""
        now: dict[str, _Seen] = {}
        try:
            self._files.invalidate_cache()
            for name, files in self._stored_flat() if self._flat else self._folders():
                if NAME.match(name) and len(now) < MAX_ADAPTERS:
                    seen = self._look_at(name, f"{self._root}/{name}", files)
                    if seen is not None:
                        now[name] = seen
        except OSError:
            raise
        except Exception as problem:  # a file system that somebody else wrote raises what its network library raises
            raise OSError(f"{self.place}: {type(problem).__name__}: {problem}") from problem
        self._seen = now
        return {name: seen.offer for name, seen in now.items()}

    def _folders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(folder's name, file's name -> what is known of it)."""
        for entry in self._files.ls(self._root, detail=True):
            if entry["type"] == "directory":
                name = str(entry["name"]).rstrip("/").rpartition("/")[2]
                with contextlib.suppress(OSError):  # it is being deleted: the next look says
                    listed = self._files.ls(f"{self._root}/{name}", detail=True)
                    yield name, {str(each["name"]).rpartition("/")[2]: each for each in listed}

    def _stored_flat(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The same of a store of objects, which lists thousands of them, of all folders, in one answer."""
        found: dict[str, dict[str, Any]] = {}
        for path, entry in self._files.find(self._root, detail=True).items():
            name, _, file = str(path).removeprefix(f"{self._root}/").partition("/")
            if file in (CONFIG, WEIGHTS):
                found.setdefault(name, {})[file] = entry
        yield from found.items()

    def _look_at(self, name: str, folder: str, files: dict[str, Any]) -> _Seen | None:
        try:
            if not all(
                name in files and files[name]["type"] == "file" and 0 < (files[name]["size"] or 0) <= most
                for name, most in ((CONFIG, MAX_CONFIG_BYTES), (WEIGHTS, MAX_WEIGHTS_BYTES))
            ):
                return None
            stamp = "\n".join(str(sorted(files[each].items())) for each in (CONFIG, WEIGHTS))
            former = self._seen.get(name)
            if former is not None and former.stamp == stamp:
                return former
            # by name: s3fs has another parameter between these
            rank = _rank(self._files.cat_file(str(files[CONFIG]["name"]), start=0, end=MAX_CONFIG_BYTES))
        except OSError:  # it is being deleted or written: the next look says
            return None
        version = hashlib.sha256(f"{folder}\n{stamp}".encode()).hexdigest()
        return _Seen(stamp, Offer(name, folder, version, rank))


def fetched_folder() -> Path:
    """Where a host keeps adapters of a remote root, for all engines on it."""
    return cache_directory() / "fetched_adapters"


def _open(place: str) -> tuple[AbstractFileSystem, str]:
    files, root = fsspec.core.url_to_fs(place)
    return files, str(root).rstrip("/")


def is_remote(place: str) -> bool:
    """Whether each host has to fetch what lies there."""
    return "://" in place


def _rank(config: bytes) -> int:
    """What an adapter's config says, for lists; the engine checks it. 0 if it says nothing."""
    try:
        rank = json.loads(config).get("r", 0)
    except (ValueError, AttributeError, RecursionError):
        return 0
    return rank if isinstance(rank, int) and 0 < rank < 1 << 16 else 0


def fetch(place: str, folder: str, version: str, into: Path) -> Path:
    """A directory of this host with an adapter's two files; found there if it was fetched before.

    Raises OSError; ValueError for a file that is larger than its bound, or a folder outside the root.
    """
    files, root = _open(place)
    name = folder.rpartition("/")[2]
    if folder != f"{root}/{name}" or not NAME.match(name) or not re.fullmatch(r"[0-9a-f]{64}", version):
        raise ValueError(f"adapter {name!r} does not lie in the fleet's root")
    target = into / version / name
    if target.is_dir() and stat.S_ISREG((target / WEIGHTS).lstat().st_mode):
        return target
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=into) as fresh:
        made = Path(fresh, version, name)
        made.mkdir(parents=True)
        for each, most in ((CONFIG, MAX_CONFIG_BYTES), (WEIGHTS, MAX_WEIGHTS_BYTES)):
            with files.open(f"{folder}/{each}", "rb") as source, (made / each).open("wb") as file:
                if not _copy(source, file, most):
                    raise ValueError(f"{each} of adapter {name!r} has more than {most} bytes")
        try:
            os.rename(made.parent, target.parent)
        except OSError:
            if not target.is_dir():  # else another engine of this host was faster
                raise
    return target


def _copy(source: IO[bytes], target: IO[bytes], most: int) -> bool:
    """False as soon as more than `most` bytes came, whatever the store said of their number."""
    left = most
    while piece := source.read(min(COPY_BYTES, left + 1)):
        left -= len(piece)
        if left < 0:
            return False
        target.write(piece)
    return True
