"""A file with the adapters that clients have loaded, so that the next server at the same address has them."""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from ..protocol.adapter_map import MAX_AHEAD_SECONDS, AdapterEntry
from ..protocol.addresses import parse
from .settings import ServeSettings

_log = logging.getLogger(__name__)


class _Saved(Struct, forbid_unknown_fields=True):
    """Contents of the file. `given`: adapters of the command line, name -> directory."""

    given: dict[str, str]
    entries: list[AdapterEntry]


_decode = msgspec.json.Decoder(_Saved).decode


class SavedAdapters:
    """The file of a server; it depends on the model's directory and the address. Does nothing if none is configured."""

    def __init__(self, settings: ServeSettings) -> None:
        self._given, self._is_in_folder = settings.adapters, settings.is_in_folder
        self.path: Path | None = None
        self._written: list[AdapterEntry] | None = None
        address = parse(settings.bind)
        if settings.saved_adapters and not (address.scheme == "tcp" and not address.port):
            key = hashlib.sha256(f"{settings.model}\n{address}".encode()).hexdigest()[:16]
            self.path = Path(settings.saved_adapters, f"{key}.json")

    def read(self) -> list[AdapterEntry]:
        """Return the saved changes, except those that the command line overrules. Logs what is left out.

        A file that is damaged, or that others could have written, is renamed and not read.

        If the clock was set back far, they count as made now: later changes would have earlier stamps.
        """
        self._written = self._read()
        return self._written

    def _read(self) -> list[AdapterEntry]:
        if self.path is None:
            return []
        try:
            saved = _decode(_read_own(self.path))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as problem:
            _log.warning("loaded adapters of the last run are not read: %s: %s", self.path, problem)
            self._set_aside(self.path)
            return []
        now = int(time.time() * 1000)
        kept = [_not_ahead(entry, now) for entry in saved.entries if not self._is_overruled(entry, saved)]
        loaded = [entry.name for entry in kept if entry.path is not None]
        if loaded:
            _log.info("loading adapters of the last run again: %s (%s)", ", ".join(sorted(loaded)), self.path)
        return kept

    def _set_aside(self, path: Path) -> None:
        """Rename a file that cannot be used. If that fails, nothing is saved in its place."""
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}")
        try:
            os.rename(path, aside)
            _log.warning("the file is renamed to %s", aside)
        except OSError as problem:
            _log.warning("it cannot be renamed, so loaded adapters are not saved: %s; move it away", problem)
            self.path = None

    def _is_overruled(self, entry: AdapterEntry, saved: _Saved) -> bool:
        given = self._given.get(entry.name)
        if self._is_in_folder(entry.path) or self._is_in_folder(given):
            return True
        if given is None or (entry.path is not None and saved.given.get(entry.name) == given):
            return False
        _log.warning("adapter %r: --lora-modules has priority over the change of the last run", entry.name)
        return True

    def write(self, entries: list[AdapterEntry]) -> None:
        """Replace the file if this list is not the one that was written last.

        Logs errors: the adapters remain loaded, but the next server does not have them.
        """
        if self.path is None or entries is self._written:
            return
        self._written = entries
        temporary = None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".adapters-", delete=False) as file:
                temporary = file.name
                file.write(msgspec.json.encode(_Saved(self._given, entries)))
                file.flush()
                os.fsync(file.fileno())  # a power loss must not leave an empty file under the new name
            os.replace(temporary, self.path)
        except OSError as problem:
            _log.warning("loaded adapters are not saved: %s: %s", self.path, problem)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def _read_own(path: Path) -> bytes:
    """Return the bytes of a regular file of this user. Raises ValueError for another one, OSError."""
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_uid != os.geteuid():
            raise ValueError("it belongs to another user")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"others may write to it (mode {stat.S_IMODE(found.st_mode):03o})")
        return file.read()


def _not_ahead(entry: AdapterEntry, now: int) -> AdapterEntry:
    """Return the entry, with a stamp of `now` (milliseconds) if its own is too far ahead."""
    if entry.stamp.milliseconds <= now + MAX_AHEAD_SECONDS * 1000:
        return entry
    return structs.replace(entry, stamp=structs.replace(entry.stamp, milliseconds=now))
