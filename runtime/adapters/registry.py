"""The adapters that the engine knows: names, numbers, contents, and where their files are."""

import hashlib
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ...graphs.adapter import Adapter, Describe, load_adapter
from ...graphs.adapter_config import CONFIG, AdapterError
from ...graphs.adapter_description import describe_adapter
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import LORA_DIRECTORY, EagleConfig
from ...graphs.lora import LoraShape
from ...graphs.model_directory import WEIGHTS, adapter_directory, without_file_name
from ...graphs.stack import check_fits
from ..api.errors import RequestError
from ..text.chat_files import NO_CHAT, AdapterChat, ChatTemplateError, read_adapter_chat
from .describing import AdapterDescriber
from .disk_cache import SlotCache

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_ADAPTERS = 4096
READERS = 8  # threads; reading, checking and hashing all release the interpreter
Stamp = tuple[tuple[int, ...], ...]
_Read = tuple[Path, Adapter, Stamp | None, AdapterChat]
_log = logging.getLogger("sidestream")


@dataclass(frozen=True)
class KnownAdapter:
    """A registered adapter: its number in plans, and what was read from disk, without the tensors."""

    number: int
    name: str
    path: Path
    adapter: Adapter
    roots: tuple[Path, ...] | None = None
    """Directories under which its files must lie when they are read again; None: anywhere."""
    chat: AdapterChat = NO_CHAT
    """Its own chat templates and tokens."""

    @property
    def content_hash(self) -> str:
        """Same hash, same outputs."""
        return self.adapter.content_hash


def check_name(name: str) -> None:
    """Raises RequestError unless `name` may name an adapter."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"adapter name {str(name)[:140]!r} must be 1 to 128 letters, digits, dots, underscores or hyphens; "
            "rename it"
        )


class AdapterRegistry:
    """Name -> adapter, safe for several threads.

    numbers, hashes   name -> number and number -> content hash: what the scheduler sees. A number is never used twice,
                      so a reloaded adapter is a new one
    max_rank          largest rank that is accepted
    allowed_roots     directories under which adapters and their files must lie, after all links; None = anywhere
    max_adapters      most names at a time
    keep              adapters whose tensors are kept from `add` until they are first `read`; others are read from disk
                      again
    cache             what is kept of adapters between runs: one whose file is known from before is hashed, and its
                      tensors are not kept
    lenient           unknown fields of adapter_config.json are ignored instead of refused
    describe          who reads the configs and the weights' headers
    draft             the trained draft that is in use: adapters' own LoRAs of it are read with them
    lora, draft_lora  the stacks' shapes once they are fixed: what does not fit is refused
    """

    def __init__(
        self,
        config: LlamaConfig,
        max_rank: int,
        allowed_roots: Sequence[str | Path] | None = None,
        max_adapters: int = MAX_ADAPTERS,
        keep: int = 64,
        cache: SlotCache | None = None,
        lenient: bool = False,
        describe: Describe = describe_adapter,
        draft: EagleConfig | None = None,
    ) -> None:
        self.config = config
        self.draft = draft
        self.max_rank = max_rank
        self.allowed_roots: tuple[Path, ...] | None = None
        if allowed_roots is not None:
            self.restrict(allowed_roots)
        self.max_adapters = max_adapters
        self.numbers: dict[str, int] = {}
        self.hashes: dict[int, str] = {}
        self.lora: LoraShape | None = None
        self.draft_lora: LoraShape | None = None
        self.cache = cache
        self._keep = keep
        self._lenient, self._describe = lenient, describe
        self._stamps: dict[int, Stamp | None] = {}
        self._by_number: dict[int, KnownAdapter] = {}
        self._fresh: dict[int, Adapter] = {}
        self._unused: set[int] = set()
        self._next = 0
        self._lock = threading.Lock()

    def restrict(self, roots: Sequence[str | Path]) -> None:
        """From now on adapters and their files must lie under one of `roots`; those that are here may stay."""
        self.allowed_roots = tuple(Path(os.path.realpath(root)) for root in roots)

    def continue_at(self, number: int) -> None:
        """The next adapter gets this number: another process has counted."""
        with self._lock:
            self._next = number

    def add(self, name: str, path: str | Path, replace_name: bool = False) -> KnownAdapter:
        """Read and check a PEFT adapter's directory.

        `replace_name`: the name may be in use; its former adapter keeps its number until `drop`. Raises RequestError
        for a bad or used name, a name that was removed or replaced while the files were read, a directory that is not
        allowed or one adapter too many, AdapterError for a directory that cannot be served; then nothing has changed.
        """
        former = self.numbers.get(name)
        read = self._read(name, path, replace_name)
        return self._register(name, *read, replace_name, former)

    def add_all(
        self, paths: Mapping[str, str | Path], refused: dict[str, Exception] | None = None
    ) -> Iterator[KnownAdapter]:
        """Adds several, read on some threads and numbered in the order given. One that can't be added raises as `add`
        does, or is left out and put into `refused`.
        """
        waiting = deque(paths.items())
        # few at a time: each holds an adapter's tensors
        reads: deque[tuple[str, Future[_Read]]] = deque()
        with ThreadPoolExecutor(READERS, "adapter-reader") as pool:
            while waiting or reads:
                while waiting and len(reads) < READERS:
                    name, path = waiting.popleft()
                    reads.append((name, pool.submit(self._read, name, path, False)))
                name, read = reads.popleft()
                try:
                    known = self._register(name, *read.result())
                except (ValueError, OSError) as problem:
                    if refused is None:
                        raise
                    refused[name] = problem
                else:
                    yield known

    def _read(self, name: str, path: str | Path, replace_name: bool) -> _Read:
        check_name(name)
        self._check_room(name, replace_name)
        lora = self.lora  # what does not fit the stacks is refused before it takes memory
        rank = self.max_rank if lora is None else min(self.max_rank, lora.rank)
        try:
            directory = self._resolve(name, path)
            stamp = _stamp(directory)
            adapter = self._load(directory, rank, self.allowed_roots, fresh=True)
        except AdapterError as problem:
            raise AdapterError(f"adapter {name!r}: {problem}") from None
        if lora is not None:
            try:
                check_fits(adapter, lora)
            except ValueError as error:
                raise RequestError(f"adapter {name!r}: {error}") from error
            self._check_draft(name, adapter.draft)
        return directory, adapter, stamp, self._chat(name, directory)

    def _chat(self, name: str, directory: Path) -> AdapterChat:
        describer = self._describe
        read = describer.read_chat if isinstance(describer, AdapterDescriber) else read_adapter_chat
        try:
            return read(directory, self.allowed_roots)
        except ChatTemplateError as problem:
            _log.warning("adapter %r: its chat template is not used: %s", name, problem)
            return NO_CHAT

    def _check_draft(self, name: str, draft: Adapter | None) -> None:
        if draft is None:
            return
        if self.draft_lora is None:
            _log.warning(
                "adapter %r: its LoRA of the draft is not used: the engine was started without any; name an adapter "
                "that has one at the start",
                name,
            )
            return
        try:
            check_fits(draft, self.draft_lora)
        except ValueError as error:
            raise RequestError(f"adapter {name!r}, its LoRA of the draft: {error}") from error

    def _load(self, directory: Path, max_rank: int, roots: tuple[Path, ...] | None, fresh: bool = False) -> Adapter:
        """An adapter and its LoRA of the draft. `fresh`: what the cache knows by its source has no tensors; and what it
        does not is told to it.
        """

        def load(path: Path, config: LlamaConfig, rank: int) -> Adapter:
            recall = self.cache.recall if fresh and self.cache is not None else None
            found = load_adapter(path, config, rank, self._lenient, recall, roots, self._describe)
            if fresh and self.cache is not None and found.tensors:
                self.cache.remember(found)
            return found

        adapter = load(directory, self.config, max_rank)
        if self.draft is None or not (directory / LORA_DIRECTORY).is_dir():
            return adapter
        try:
            draft = load(directory / LORA_DIRECTORY, self.draft, self.max_rank)
        except AdapterError as problem:
            raise AdapterError(f"its LoRA of the draft: {problem}") from None
        both = hashlib.sha256(f"{adapter.content_hash} {draft.content_hash}".encode()).hexdigest()
        if not (adapter.tensors and draft.tensors):  # all of it, or nothing
            adapter, draft = replace(adapter, tensors={}), replace(draft, tensors={})
        return replace(adapter, content_hash=both, draft=draft)

    def _register(
        self,
        name: str,
        directory: Path,
        adapter: Adapter,
        stamp: Stamp | None,
        chat: AdapterChat,
        replace_name: bool = False,
        former: int | None = None,
    ) -> KnownAdapter:
        with self._lock:
            self._check_room(name, replace_name)
            if self.numbers.get(name) != former:
                raise RequestError(f"adapter {name!r} was removed or replaced meanwhile; load it again")
            draft = None if adapter.draft is None else replace(adapter.draft, tensors={})
            bare = replace(adapter, tensors={}, draft=draft)
            known = KnownAdapter(self._next, name, directory, bare, self.allowed_roots, chat)
            self._next += 1
            self._by_number[known.number] = known
            if len(self._fresh) < self._keep:
                self._fresh[known.number] = adapter
            self._stamps[known.number] = stamp
            self.hashes[known.number] = adapter.content_hash
            self.numbers[name] = known.number
        return known

    def remove(self, name: str) -> int:
        """Forget a name; returns its number, by which requests that are under way still reach the adapter until
        `drop`.
        """
        self.require(name)
        with self._lock:
            number = self.numbers.pop(name)
            if number in self._unused:
                self._forget(number)
            return number

    def drop(self, number: int) -> None:
        """Nothing uses this number any more. What is known of it goes; while its name is still there, with the name:
        the news of both come on different ways, in any order.
        """
        with self._lock:
            if number in self.numbers.values():
                self._unused.add(number)
            else:
                self._forget(number)

    def is_wanted(self, number: int) -> bool:
        """Whether something may still use the number."""
        with self._lock:
            return number in self._by_number and number not in self._unused

    def _forget(self, number: int) -> None:
        self._unused.discard(number)
        for known in (self._by_number, self._fresh, self._stamps, self.hashes):
            known.pop(number, None)

    def read(self, number: int) -> Adapter:
        """The adapter with its tensors.

        Raises AdapterError when its files are gone or are no longer those that were registered.
        """
        known = self._by_number[number]
        with self._lock:
            fresh = self._fresh.pop(number, None)
        if fresh is not None and fresh.tensors:
            return fresh
        stamp = _stamp(known.path)
        adapter = self._load(known.path, self.max_rank, known.roots)
        if adapter.content_hash != known.content_hash:
            if self.cache is not None:
                for now, then in ((adapter, known.adapter), (adapter.draft, known.adapter.draft)):
                    if now is not None and then is not None and now.source == then.source:
                        self.cache.forget(now.source)
            raise AdapterError("its files have changed since it was registered; register it again")
        with self._lock:
            if number in self._stamps:
                self._stamps[number] = stamp
        return adapter

    def is_unchanged(self, number: int) -> bool:
        """Whether what is known by the adapter's content hash may stand for its files: not yet asked since `add`, or
        they look as they did then.

        It is no proof, and need not be one: what is kept under the content hash is what was registered. Only that files
        were changed may be told later.
        """
        known = self._by_number[number]
        with self._lock:
            fresh, stamp = number in self._fresh, self._stamps.get(number)
        return fresh or (stamp is not None and stamp == _stamp(known.path))

    def let_go(self, number: int) -> None:
        """Its tensors are not needed for the first `read`."""
        with self._lock:
            self._fresh.pop(number, None)

    def require(self, name: str) -> None:
        """Raises RequestError for a name that is not registered."""
        if name not in self.numbers:
            known = ", ".join(sorted(self.numbers)[:20]) or "none"
            raise RequestError(
                f"adapter {name!r} is not known; known: {known}; give it to LLM(adapters={{{name!r}: path}}) or "
                "add_adapter"
            )

    def by_number(self, number: int) -> KnownAdapter:
        """The adapter that a plan means."""
        return self._by_number[number]

    @property
    def adapters(self) -> list[Adapter]:
        """Everything that has a name, without tensors."""
        return [self._by_number[number].adapter for number in self.numbers.values()]

    def _check_room(self, name: str, replace_name: bool) -> None:
        if name in self.numbers:
            if not replace_name:
                raise RequestError(f"adapter {name!r} is there already; choose another name, or give replace=True")
        elif len(self.numbers) >= self.max_adapters:
            raise RequestError(
                f"adapter {name!r} is one more than the {self.max_adapters} that are allowed; remove another first"
            )

    def _resolve(self, name: str, path: str | Path) -> Path:
        if self.allowed_roots is None:
            return adapter_directory(path)
        directory = Path(os.path.realpath(without_file_name(Path(path))))
        if not any(directory.is_relative_to(root) for root in self.allowed_roots):
            raise RequestError(
                f"adapter {name!r}: its path does not lie under a directory from which adapters may be loaded; move "
                "it there"
            )
        return directory


def _stamp(directory: Path) -> Stamp | None:
    """What tells one state of an adapter's files from another without reading them; None when they are not there."""
    try:
        states = [(directory / name).stat() for name in (WEIGHTS, CONFIG)]
        draft = directory / LORA_DIRECTORY
        states += [(draft / name).stat() for name in (WEIGHTS, CONFIG) if draft.is_dir()]
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return None
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states)
