"""Stamps of adapters' files: with the same stamp, a directory's files are unchanged."""

from collections.abc import Iterable
from pathlib import Path

from ...graphs.adapter_config import CONFIG
from ...graphs.adapter_names import MLX, PEFT
from ...graphs.draft.config import LORA_DIRECTORY

FileStamp = tuple[tuple[int, ...], ...]


def joined(stamps: Iterable[FileStamp | None]) -> FileStamp | None:
    """Return one stamp for several directories, or None if one has no files."""
    found = list(stamps)
    return None if None in found else tuple(file for stamp in found if stamp is not None for file in stamp)


def file_stamp(directory: Path) -> FileStamp | None:
    """Return inode, size and times of an adapter's files, or None if they do not exist."""
    states = []
    try:
        for folder in (directory, directory / LORA_DIRECTORY):
            if folder is directory or folder.is_dir():
                form = PEFT if (folder / PEFT.weights).exists() else MLX
                states += [(folder / name).stat() for name in (form.weights, CONFIG)]
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return None
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states)
