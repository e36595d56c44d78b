"""The standard library's sources, docstrings included, cut into documents.

The name of a file alone decides its side of the split, so that training and evaluation agree across machines and
Python versions.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]

DOCUMENT_CHARACTERS = 3000  # about 1024 tokens of the evaluation model's tokenizer
MINIMUM_CHARACTERS = 1500  # the bootstrap weighs documents, so that short ones add noise
HELD_OUT_SHARE = 0.2
# Folders to leave out: other packages, tests, and code tables that resemble each other.
_FOREIGN = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "encodings",
    "__phello__",
}


def is_held_out(name: str) -> bool:
    """Return whether the file with this path relative to the library (forward slashes) is held out from training."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) < HELD_OUT_SHARE * 2**32


@cache
def library_files() -> tuple[str, ...]:
    """Return the sorted paths of the library's modules, relative to its folder."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return tuple(sorted(name.as_posix() for name in names if not _FOREIGN.intersection(name.parts[:-1])))


def documents(split: Split, limit: int | None = None) -> Iterator[str]:
    """Yield texts of at most about 1024 tokens, each from one file and cut between lines.

    Copies of held-out texts in other files, which some distributions have, are not in training. The first documents
    of all files are yielded before the second ones, so that a small `limit` covers many files.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}, and must be 'train' or 'held_out'")
    pieces = [_pieces(name) for name in library_files() if is_held_out(name) == (split == "held_out")]
    if split == "train":
        held_out = {text for name in library_files() if is_held_out(name) for text in _pieces(name)}
        pieces = [tuple(text for text in texts if text not in held_out) for texts in pieces]
    given = 0
    for index in range(max(map(len, pieces), default=0)):
        for texts in pieces:
            if index < len(texts):
                if limit is not None and given >= limit:
                    return
                given += 1
                yield texts[index]


@cache
def _pieces(name: str) -> tuple[str, ...]:
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ()  # a few modules have other encodings
    pieces, start = [], 0
    while len(text) - start >= MINIMUM_CHARACTERS:
        end = text.rfind("\n", start, start + DOCUMENT_CHARACTERS) + 1
        end = end if end > start else start + DOCUMENT_CHARACTERS
        pieces.append(text[start:end])
        start = end
    return tuple(piece for piece in pieces if len(piece) >= MINIMUM_CHARACTERS)
