"""The adapters below a root, each in a folder of its own: those of a fleet, or of `--lora-modules-from`.

The root is a directory on all hosts, or a URL that fsspec reads (such as `s3://bucket/adapters` with s3fs).
A scan compares sizes and times of files to detect possible changes. The engine that loads a version compares the hash
of its content.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ...text.chat_files import CHAT_FILES
from .adapter_catalogue import OfferedAdapter

CONFIG, WEIGHTS, MLX_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_FILE_BYTES = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: 16 << 30, MLX_WEIGHTS: 16 << 30, **CHAT_FILES}
"""Files of an adapter, with their largest sizes."""
MAX_ADAPTERS = 100_000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True)
class _ScannedFolder:
    stamp: str
    adapter: OfferedAdapter


class AdapterRoot:
    """A directory or URL. Folders that are not adapters are ignored.

    Raises ValueError for a URL whose file system is not installed.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        try:
            self._files, self._root = _open(location)
        except (ImportError, ValueError) as error:
            raise ValueError(f"the adapters' root {location!r} cannot be read: {error}") from None
        self._is_object_store = not isinstance(self._files, LocalFileSystem)
        self._scanned: dict[str, _ScannedFolder] = {}

    def scan(self) -> Mapping[str, OfferedAdapter]:
        """Return name -> adapter. Raises OSError if the root cannot be read."""
        folders: dict[str, _ScannedFolder] = {}
        try:
            self._files.invalidate_cache()
            for name, files in self._list_objects() if self._is_object_store else self._list_directories():
                if NAME.match(name) and len(folders) < MAX_ADAPTERS:
                    folder = self._scan_folder(name, f"{self._root}/{name}", files)
                    if folder is not None:
                        folders[name] = folder
        except OSError:
            raise
        except Exception as problem:  # fsspec file systems also raise the errors of their network libraries
            raise OSError(f"{self.location}: {type(problem).__name__}: {problem}") from problem
        self._scanned = folders
        return {name: folder.adapter for name, folder in folders.items()}

    def find(self, name: str) -> str | None:
        """Return the location of an adapter's folder; None without one with a config. It may be a link within the root.

        The engine that loads the adapter checks its files. Raises OSError if the root cannot be read.
        """
        if not NAME.match(name):
            return None
        try:
            if not self._is_object_store:
                real = os.path.realpath(self._root)
                folder = os.path.realpath(os.path.join(real, name))
                if os.path.commonpath([real, folder]) != real or not os.path.isdir(folder):
                    return None
            self._files.invalidate_cache()
            found = self._files.isfile(f"{self._root}/{name}/{CONFIG}")
        except OSError:
            raise
        except Exception as problem:  # see `scan`
            raise OSError(f"{self.location}: {type(problem).__name__}: {problem}") from problem
        return self._path(name) if found else None

    def _list_directories(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (folder name, file name -> file info)."""
        for entry in self._files.ls(self._root, detail=True):
            if entry["type"] == "directory":
                name = str(entry["name"]).rstrip("/").rpartition("/")[2]
                with contextlib.suppress(OSError):  # it is being deleted: the next scan finds out
                    listed = self._files.ls(f"{self._root}/{name}", detail=True)
                    yield name, {str(each["name"]).rpartition("/")[2]: each for each in listed}

    def _list_objects(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the same as `_list_directories` for an object store, which lists all folders in one response."""
        folders: dict[str, dict[str, Any]] = {}
        for path, entry in self._files.find(self._root, detail=True).items():
            name, _, file = str(path).removeprefix(f"{self._root}/").partition("/")
            if file in MAX_FILE_BYTES:
                folders.setdefault(name, {})[file] = entry
        yield from folders.items()

    def _scan_folder(self, name: str, folder: str, files: dict[str, Any]) -> _ScannedFolder | None:
        try:
            weights = MLX_WEIGHTS if WEIGHTS not in files and MLX_WEIGHTS in files else WEIGHTS
            if not all(
                name in files
                and files[name]["type"] == "file"
                and 0 < (files[name]["size"] or 0) <= MAX_FILE_BYTES[name]
                for name in (CONFIG, weights)
            ):
                return None
            stamp = "\n".join(str(sorted(files[each].items())) for each in MAX_FILE_BYTES if each in files)
            former = self._scanned.get(name)
            if former is not None and former.stamp == stamp:
                return former
            # keyword arguments, since s3fs has another parameter in between
            rank = rank_in(self._files.cat_file(str(files[CONFIG]["name"]), start=0, end=MAX_CONFIG_BYTES))
        except OSError:  # it is being deleted or written: the next scan finds out
            return None
        version = hashlib.sha256(f"{folder}\n{stamp}".encode()).hexdigest()
        return _ScannedFolder(stamp, OfferedAdapter(name, self._path(name), version, rank))

    def _path(self, name: str) -> str:
        """Return the location of a folder for engines, which copy the files of an address."""
        return self.location + name if self.location.endswith("/") else f"{self.location}/{name}"


def _open(location: str) -> tuple[AbstractFileSystem, str]:
    files, root = fsspec.core.url_to_fs(location)
    return files, str(root).rstrip("/")


def rank_in(config: bytes) -> int:
    """Return the rank in an adapter's config, 0 if it has none. Only for listings; the engine checks the config."""
    try:
        fields = json.loads(config)
        rank = fields["r"] if "r" in fields else fields.get("lora_parameters", {}).get("rank")  # PEFT's, or mlx_lm's
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 0
    return rank if isinstance(rank, int) and 0 < rank < 1 << 16 else 0
