"""Programs stored on disk between runs, so that a restart neither captures the model nor runs the passes.

The key is a hash of the releases, the sources, the model's config, the options, the pass list and the bucket. The
number of KV pages depends on free memory, so the key excludes it, and it is set on load. Deleting the directory is
always safe.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from ..options import CompileOptions
from .buffers import ProgramError
from .cache_folder import CacheFolder
from .program import VERSION, Bucket, Program, Step, View
from .sizes import dimensions_of

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).parents[2]
SOURCES = ("ops", "graphs", "compiler")
_warned: set[str] = set()
LIMIT = 4 << 30
"""Maximum bytes of all stored programs; one has a few megabytes."""


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return a hash of every source file that affects programs."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(PACKAGE)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def program_key(
    versions: Mapping[str, str],
    config: Mapping[str, Any],
    options: CompileOptions,
    passes: Sequence[str],
    bucket: Bucket | None,
) -> str:
    """Return the sha256 (hex) of a program's inputs."""
    content = {
        "program_version": VERSION,
        "versions": dict(versions),
        "config": dict(config),
        "options": options.to_dict(),
        "passes": list(passes),
        "bucket": None if bucket is None else bucket.key,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class ProgramCache:
    """The programs of one model with one set of options, in files of `folder`. An incomplete file counts as absent."""

    folder: CacheFolder
    config: Mapping[str, Any]
    options: CompileOptions
    passes: Sequence[str]

    def load(self, bucket: Bucket) -> Program | None:
        """Return the program for `bucket`, or None. A damaged or outdated file is removed (logged)."""
        name = self.name(bucket)
        text = self.folder.recall(name)
        if text is None:
            return None
        try:
            return Program.decoded(text, lambda fields: _with_pages(fields, bucket.pages))
        except ProgramError as error:
            self.folder.damaged(name, error)
            return None

    def has(self, bucket: Bucket) -> bool:
        """Return whether there is a program for `bucket`, without reading it."""
        return self.name(bucket) in self.folder

    def save(self, bucket: Bucket, program: Program) -> None:
        """Save `program`. A full or read-only disk only makes the next start slower (logged)."""
        try:
            self.folder.keep(self.name(bucket), with_pages(program, 1).encoded())
        except OSError as error:
            if str(error) not in _warned:  # one warning per reason, not per program
                _warned.add(str(error))
                log.warning(
                    "the program %s is not kept for the next start: %s; free space there, or set SIDESTREAM_CACHE",
                    bucket.name,
                    error,
                )

    def name(self, bucket: Bucket) -> str:
        """Return the name of the file of the program for `bucket`."""
        versions = {"torch": torch.__version__, "triton": triton.__version__, "sources": source_hash()}
        return f"{program_key(versions, self.config, self.options, self.passes, replace(bucket, pages=1))}.program"


def with_pages(program: Program, pages: int) -> Program:
    """Return the program for another number of KV pages; only the first size of the cache buffers depends on it."""
    return Program(**_with_pages({field.name: getattr(program, field.name) for field in fields(program)}, pages))


def _with_pages(program: dict[str, Any], pages: int) -> dict[str, Any]:
    """Return the fields of a program for another number of KV pages."""
    caches = {buffer.name for buffer in program["buffers"] if "NP" in dimensions_of(buffer.name)}

    def has_pages(values: tuple[Any, ...]) -> bool:
        return any(
            value.buffer in caches if isinstance(value, View) else isinstance(value, tuple) and has_pages(value)
            for value in values
        )

    def resized(value: Any) -> Any:
        if isinstance(value, View):
            return replace(value, shape=(pages, *value.shape[1:])) if value.buffer in caches else value
        return tuple(map(resized, value)) if isinstance(value, tuple) else value

    def step(each: Step) -> Step:
        if not has_pages((each.args, each.kwargs)):
            return each
        return replace(each, args=resized(each.args), kwargs=resized(each.kwargs))

    buffers = tuple(
        replace(buffer, shape=(pages, *buffer.shape[1:])) if buffer.name in caches else buffer
        for buffer in program["buffers"]
    )
    bucket = None if program["bucket"] is None else replace(program["bucket"], pages=pages)
    return {**program, "bucket": bucket, "buffers": buffers, "steps": tuple(map(step, program["steps"]))}
