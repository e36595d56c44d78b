"""Registry of the engine's adapters: names, numbers, content hashes and directories."""

import hashlib
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ...graphs.adapter import Adapter, Describe, load_adapter, load_update
from ...graphs.adapter_config import CONFIG, AdapterError
from ...graphs.adapter_description import AGAIN_FROM_MEMORY, UPDATE, describe_adapter, describe_update
from ...graphs.adapter_names import PEFT
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import LORA_DIRECTORY, EagleConfig
from ...graphs.files.update_file import UpdateFile
from ...graphs.lora import LoraShape
from ...graphs.lora_stacks import check_fits
from ...graphs.model_directory import adapter_directory, without_file_name
from ..api.adapter_sum import sum_content, sum_name
from ..api.adapter_versions import next_version, split_version, version_name, versions_of
from ..api.errors import RequestError
from ..text.chat_files import NO_CHAT, AdapterChat, ChatTemplateError, read_adapter_chat
from .describer import AdapterDescriber
from .disk_cache import AdapterDiskCache
from .file_stamps import FileStamp, file_stamp, joined
from .weighted_sum import weighted_sum

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_ADAPTERS = 4096
MAX_TEMPLATE_BYTES = 64 << 20
"""Limit on the different chat templates of all adapters; copies of one template share their memory."""
UNREAD_BYTES = 16 << 30
"""Largest tensors in memory from `add` to the first `read`. An adapter on many experts has gigabytes."""
READERS = 8  # threads; reading, checking and hashing release the GIL
_Files = tuple[Path, Adapter, FileStamp | None, AdapterChat]
_Roots = tuple[Path, ...] | None
_log = logging.getLogger("sidestream")


@dataclass(frozen=True)
class RegisteredAdapter:
    """A registered adapter.

    number   its number in step plans
    adapter  its files' content without tensors
    roots    directories that must contain its files when they are read again; None: any directory
    chat     its own chat templates and tokens
    parts    adapters and their weights, if it is a sum; `path` is then the first one's
    memory   the adapter with its tensors, if it is an update and has no files
    """

    number: int
    name: str
    path: Path
    adapter: Adapter
    roots: tuple[Path, ...] | None = None
    chat: AdapterChat = NO_CHAT
    parts: tuple[tuple["RegisteredAdapter", float], ...] = ()
    memory: Adapter | None = None

    @property
    def content_hash(self) -> str:
        """Adapters with the same hash give the same outputs."""
        return self.adapter.content_hash


def check_name(name: str) -> None:
    """Raise RequestError for an invalid adapter name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"adapter name {str(name)[:140]!r} must be 1 to 128 letters, digits, dots, underscores or hyphens; "
            "rename it"
        )


class AdapterRegistry:
    """Name -> adapter; thread-safe.

    numbers, hashes   name -> number and number -> content hash, for the scheduler. Numbers are never reused: a reloaded
                      adapter gets a new one
    invocations       number -> invocation of an aLoRA adapter
    max_rank          largest accepted LoRA rank
    allowed_roots     directories that must contain adapters' files after symlinks are resolved; None: any directory
    max_adapters      maximum number of names
    keep              maximum number of adapters with tensors kept in memory from `add` to the first `read`
    disk_cache        content hashes and packed adapters of earlier runs; tensors of a file with a cached hash are not
                      kept
    lenient           ignore unknown fields of adapter_config.json instead of raising an error
    describe          reads configs and weights' headers
    draft             the trained draft in use, for which adapters may have a LoRA; None: without a draft
    base              the base's directory: adapters' tokens are compared with its tokenizer, and changed rows of the
                      embedding with its checkpoint; None: random weights
    lora, draft_lora  shapes of the stacks, once allocated; adapters that do not fit are rejected
    """

    def __init__(
        self,
        config: LlamaConfig,
        max_rank: int,
        allowed_roots: Sequence[str | Path] | None = None,
        max_adapters: int = MAX_ADAPTERS,
        keep: int = 64,
        disk_cache: AdapterDiskCache | None = None,
        lenient: bool = False,
        describe: Describe = describe_adapter,
        draft: EagleConfig | None = None,
        base: Path | None = None,
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
        self.invocations: dict[int, tuple[int, ...]] = {}
        self.lora: LoraShape | None = None
        self.draft_lora: LoraShape | None = None
        self.disk_cache = disk_cache
        self._keep = keep
        self._lenient, self._describe, self._base = lenient, describe, base
        self._stamps: dict[int, FileStamp | None] = {}
        self._by_number: dict[int, RegisteredAdapter] = {}
        self._unread: dict[int, Adapter] = {}
        self._unused: set[int] = set()
        self._hashing: dict[int, Callable[[], Adapter]] = {}  # updates until `with_hash`
        self._next_number = 0
        self._lock = threading.Lock()

    def restrict(self, roots: Sequence[str | Path]) -> None:
        """Set `allowed_roots` for adapters added from now on."""
        self.allowed_roots = tuple(Path(os.path.realpath(root)) for root in roots)

    def set_next_number(self, number: int) -> None:
        """Set the next adapter's number, which another process has assigned."""
        with self._lock:
            self._next_number = number

    def add(self, name: str, path: str | Path, replace_name: bool = False) -> RegisteredAdapter:
        """Read, check and register a PEFT adapter's directory.

        With `replace_name` the name may be in use; its previous adapter keeps its number until `drop`. Raises
        RequestError for the name, the directory's location or too many adapters, and AdapterError for files that cannot
        be served; the registry is then unchanged.
        """
        previous = self.numbers.get(name)
        files = self._read(name, path, replace_name)
        return self._register(name, files, replace_name, previous)

    def add_all(
        self, paths: Mapping[str, str | Path], rejected: dict[str, Exception] | None = None
    ) -> Iterator[RegisteredAdapter]:
        """Add adapters, read by a thread pool, in the given order. Errors raise as in `add` or go to `rejected`."""
        waiting = deque(paths.items())
        # few at a time: each holds an adapter's tensors
        reads: deque[tuple[str, Future[_Files]]] = deque()
        with ThreadPoolExecutor(READERS, "adapter-reader") as pool:
            while waiting or reads:
                while waiting and len(reads) < READERS:
                    name, path = waiting.popleft()
                    reads.append((name, pool.submit(self._read, name, path, False)))
                name, files = reads.popleft()
                try:
                    registered = self._register(name, files.result())
                except (ValueError, OSError) as error:
                    if rejected is None:
                        raise
                    rejected[name] = error
                else:
                    yield registered

    @property
    def _fitting_rank(self) -> int:
        """Largest rank that fits, with which others are rejected before their tensors are read."""
        lora = self.lora  # with experts there are two ranks
        return self.max_rank if lora is None or lora.expert_rank else min(self.max_rank, lora.rank)

    def _read(self, name: str, path: str | Path, replace_name: bool) -> _Files:
        check_name(name)
        self._check_capacity(name, replace_name)
        try:
            directory = self._resolve(name, path)
            stamp = file_stamp(directory)
            adapter = self._load(directory, self._fitting_rank, self.allowed_roots, use_cache=True)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from None
        self._check_fits(name, adapter)
        return directory, adapter, stamp, self._chat(name, directory)

    def _check_fits(self, name: str, adapter: Adapter) -> None:
        """Raise RequestError for an adapter that does not fit into the stacks, once these are allocated."""
        if self.lora is not None:
            try:
                check_fits(adapter, self.lora)
            except ValueError as error:
                raise RequestError(f"adapter {name!r}: {error}") from error
            self._check_draft(name, adapter.draft)

    def _chat(self, name: str, directory: Path) -> AdapterChat:
        describer = self._describe
        read = describer.read_chat if isinstance(describer, AdapterDescriber) else read_adapter_chat
        try:
            chat = read(directory, self.allowed_roots, self._base)
        except ChatTemplateError as error:
            _log.warning("adapter %r: its chat template is not used: %s", name, error)
            return NO_CHAT
        if chat.unknown:
            problem = chat.token_problem(self.config.vocab_size)
            if not self._lenient:
                raise AdapterError(f"adapter {name!r}: {problem}")
            _log.warning("adapter %r: %s", name, problem)
        return replace(chat, unknown={})

    def _check_draft(self, name: str, draft: Adapter | None) -> None:
        if draft is None:
            return
        if self.draft_lora is None:
            _log.warning(
                "adapter %r: its LoRA of the draft is not used: no adapter at the start had one; start with such an "
                "adapter",
                name,
            )
            return
        try:
            check_fits(draft, self.draft_lora)
        except ValueError as error:
            raise RequestError(f"adapter {name!r}, its LoRA of the draft: {error}") from error

    def _load(
        self, directory: Path, max_rank: int, roots: _Roots, use_cache: bool = False, with_source: bool = False
    ) -> Adapter:
        """Load an adapter and its LoRA of the draft; with `use_cache` without tensors if the hash is cached."""
        cache = self.disk_cache if use_cache else None

        def load(path: Path, config: LlamaConfig, max_rank: int) -> Adapter:
            find_hash = None if cache is None else cache.find_hash
            options = self._lenient, find_hash, roots, self._describe, self._base
            loaded = load_adapter(path, config, max_rank, *options, with_source=with_source or cache is not None)
            if cache is not None and loaded.is_read:
                cache.save_hash_later(loaded)
            return loaded

        adapter = load(directory, self.config, max_rank)
        if self.draft is None or not (directory / LORA_DIRECTORY).is_dir():
            return adapter
        try:
            draft = load(directory / LORA_DIRECTORY, self.draft, self.max_rank)
        except AdapterError as error:
            raise AdapterError(f"its LoRA of the draft: {error}") from None
        if draft.kinds:
            raise AdapterError("its LoRA of the draft is DoRA or IA3, or has biases: train plain LoRA for the draft")
        both = hashlib.sha256(f"{adapter.content_hash} {draft.content_hash}".encode()).hexdigest()
        if not (adapter.is_read and draft.is_read):  # all tensors or none
            adapter, draft = adapter.bare, draft.bare
        return replace(adapter, content_hash=both, draft=draft)

    def _register(
        self, name: str, files: _Files, replace_name: bool = False, previous: int | None = None
    ) -> RegisteredAdapter:
        directory, adapter, stamp, chat = files
        with self._lock:
            self._check_capacity(name, replace_name)
            if self.numbers.get(name) != previous:
                raise RequestError(f"adapter {name!r} was removed or replaced meanwhile; load it again")
            self._check_templates(name, chat)
            number = self._next_number
            self._next_number += 1
            registered = RegisteredAdapter(number, name, directory, adapter.bare, self.allowed_roots, chat)
            self._store(registered, stamp)
            unread = sum(each.nbytes for each in self._unread.values())
            if len(self._unread) < self._keep and unread + adapter.nbytes <= UNREAD_BYTES:
                self._unread[number] = adapter
            self.numbers[name] = number
            self._remove_names(version_name(name, version) for version in versions_of(name, self.numbers))
            if previous is not None and previous in self._unused:
                self._delete(previous)
        return registered

    def add_version(self, name: str, file: UpdateFile, version: int | None = None) -> RegisteredAdapter:
        """Read, check and register an update, without a name yet: `publish` gives it one, `drop` deletes it. `version`:
        see `next_version`. `with_hash` returns it with its content hash, before it is published.

        Raises RequestError and AdapterError as `add` does, and VersionConflictError.
        """
        check_name(name)
        self._check_capacity(name, replace_name=True)
        version = next_version(name, version, self.numbers)
        describer, lenient = self._describe, self._lenient
        describe = describer.describe_update if isinstance(describer, AdapterDescriber) else describe_update
        try:
            adapter, content_hash = load_update(file, self.config, self._fitting_rank, lenient, describe, self._base)
        except AdapterError as error:
            text = str(error).replace(CONFIG, "config").replace(PEFT.weights, UPDATE.name)
            raise AdapterError(f"adapter {name!r}: {text.replace(PEFT.again, AGAIN_FROM_MEMORY)}") from None
        self._check_fits(name, adapter)
        with self._lock:
            number, former = self._next_number, self._by_number.get(self.numbers.get(name, -1))
            self._next_number += 1
            chat = NO_CHAT if former is None else former.chat
            named = version_name(name, version)
            update = RegisteredAdapter(number, named, Path(), adapter.bare, None, chat, memory=adapter)
            self._store(update, ())
            self._hashing[number] = lambda: replace(adapter, content_hash=content_hash())
        return update

    def with_hash(self, update: RegisteredAdapter) -> RegisteredAdapter:
        """Wait for the content hash of an update that `add_version` has returned; return the update with it."""
        memory = self._hashing.pop(update.number)()
        with self._lock:
            update = replace(update, adapter=memory.bare, memory=memory)
            self._store(update, ())
        return update

    def _store(self, registered: RegisteredAdapter, stamp: FileStamp | None) -> None:
        number = registered.number
        self._by_number[number], self._stamps[number] = registered, stamp
        self.hashes[number] = registered.content_hash
        if registered.adapter.invocation:
            self.invocations[number] = registered.adapter.invocation

    def publish(self, update: RegisteredAdapter, keep: int) -> list[int]:
        """Make an update the newest version of its name, and keep the `keep` newest ones.

        Return the numbers that have no name any more. Raises VersionConflictError for a version that has become old.
        """
        name, version = split_version(update.name)
        with self._lock:
            next_version(name, version, self.numbers)
            named = set(self.numbers.values())
            self.numbers[update.name] = self.numbers[name] = update.number
            self._remove_names(version_name(name, old) for old in versions_of(name, self.numbers)[:-keep])
            return sorted(named - set(self.numbers.values()))

    def _remove_names(self, names: Iterable[str]) -> None:
        for number in [self.numbers.pop(name) for name in names]:
            if number in self._unused and number not in self.numbers.values():
                self._delete(number)

    def add_sum(self, number: int, parts: Sequence[tuple[int, float]]) -> None:
        """Register the sum of adapters, given by numbers and weights, without a name. Its parts are read when it is.

        `number` must be above those of all adapters. `drop` deletes it.
        """
        with self._lock:
            chosen = tuple((self._by_number[part], weight) for part, weight in parts)
            name = sum_name([(part.name, weight) for part, weight in chosen], "adapter")
            content = sum_content((part.content_hash, weight) for part, weight in chosen)
            adapter = weighted_sum([(part.adapter, weight) for part, weight in chosen], content)
            registered = RegisteredAdapter(number, name, chosen[0][0].path, adapter, parts=chosen)
            self._store(registered, joined(self._stamps[part] for part, _ in parts))

    def remove(self, name: str) -> int:
        """Remove a name and return its number, which active requests may use until `drop`."""
        self.require(name)
        with self._lock:
            number = self.numbers[name]
            self._remove_names([name])
            return number

    def drop(self, number: int) -> None:
        """Delete an unused number, now or when its name is removed. `remove` and `drop` may be called in any order."""
        with self._lock:
            if number in self.numbers.values():
                self._unused.add(number)
            else:
                self._delete(number)

    def is_in_use(self, number: int) -> bool:
        """Return whether the number may still be used."""
        with self._lock:
            return number in self._by_number and number not in self._unused

    def _delete(self, number: int) -> None:
        self._unused.discard(number)
        for table in (self._by_number, self._unread, self._stamps, self._hashing, self.hashes, self.invocations):
            table.pop(number, None)

    def read(self, number: int) -> Adapter:
        """Return the adapter with its tensors. Raises AdapterError if its files are missing or have changed."""
        registered = self._by_number[number]
        with self._lock:
            unread = self._unread.pop(number, None)
        if unread is not None and unread.is_read:
            return unread
        stamp = _stamp(registered)
        if registered.parts:
            read = [(self._read_part(part), weight) for part, weight in registered.parts]
            adapter = weighted_sum(read, registered.content_hash)
        else:
            adapter = self._read_again(registered)
        with self._lock:
            if number in self._stamps:
                self._stamps[number] = stamp
        return adapter

    def _read_part(self, part: RegisteredAdapter) -> Adapter:
        try:
            return self._read_again(part)
        except AdapterError as error:
            raise AdapterError(f"{part.name!r}: {error}".replace(str(part.path), repr(part.name))) from None

    def _read_again(self, registered: RegisteredAdapter) -> Adapter:
        if registered.memory is not None:
            return registered.memory
        place = registered.path, self.max_rank, registered.roots
        adapter = self._load(*place)
        if adapter.content_hash != registered.content_hash:
            if self.disk_cache is not None:
                adapter, before = self._load(*place, with_source=True), registered.adapter
                for now, then in ((adapter, before), (adapter.draft, before.draft)):
                    if now is not None and then is not None and now.source == then.source:
                        self.disk_cache.remove_hash(now.source)
            raise AdapterError("its files have changed since it was registered; register it again")
        return adapter

    def is_unchanged(self, number: int) -> bool:
        """Return whether the adapter was not read since `add`, or its files still have the same stamps.

        A wrong result is harmless: the disk cache stores the registered content under its hash.
        """
        registered = self._by_number[number]
        with self._lock:
            unread, stamp = number in self._unread, self._stamps.get(number)
        return unread or (stamp is not None and stamp == _stamp(registered))

    def is_update(self, number: int) -> bool:
        """Return whether the adapter is an update, which has no files."""
        registered = self._by_number.get(number)
        return registered is not None and registered.memory is not None

    def discard_tensors(self, number: int) -> None:
        """Discard the tensors that are held for the first `read`."""
        with self._lock:
            self._unread.pop(number, None)

    def require(self, name: str) -> None:
        """Raise RequestError for a name that is not registered."""
        if name not in self.numbers:
            known = ", ".join(sorted(self.numbers)[:20]) or "none"
            raise RequestError(
                f"adapter {name!r} is not known; known: {known}; give it to LLM(adapters={{{name!r}: path}}) or "
                "add_adapter"
            )

    def by_number(self, number: int) -> RegisteredAdapter:
        """Return the adapter with a plan's number. Raises KeyError."""
        return self._by_number[number]

    @property
    def adapters(self) -> list[Adapter]:
        """All named adapters, without tensors."""
        return [self._by_number[number].adapter for number in self.numbers.values()]

    def _check_capacity(self, name: str, replace_name: bool) -> None:
        if name in self.numbers:
            if not replace_name:
                raise RequestError(f"adapter {name!r} has already been loaded; use another name, or give replace=True")
        elif len(self.numbers) >= self.max_adapters:
            raise RequestError(
                f"adapter {name!r} exceeds the maximum of {self.max_adapters} adapters; remove another first"
            )

    def _check_templates(self, name: str, chat: AdapterChat) -> None:
        """Raise RequestError if the chat templates of all adapters would be too large."""
        if not chat.digest:
            return
        chats = (chat, *(each.chat for each in self._by_number.values()))
        sizes = {
            text: len(text.encode("utf-8", "replace")) for each in chats for text in each.templates.templates.values()
        }
        if sum(sizes.values()) > MAX_TEMPLATE_BYTES:
            raise RequestError(
                f"adapter {name!r}: the chat templates of all adapters need more than {MAX_TEMPLATE_BYTES >> 20} MiB; "
                "remove another adapter first, or let adapters share a template"
            )

    def _resolve(self, name: str, path: str | Path) -> Path:
        if self.allowed_roots is None:
            return adapter_directory(path)
        directory = Path(os.path.realpath(without_file_name(Path(path))))
        if not any(directory.is_relative_to(root) for root in self.allowed_roots):
            raise RequestError(
                f"adapter {name!r}: its path is not under a directory from which adapters may be loaded; move it there"
            )
        return directory


def _stamp(registered: RegisteredAdapter) -> FileStamp | None:
    """Return the stamp of an adapter's files, or of those of a sum's parts."""
    parts = registered.parts or ((registered, 1.0),)
    return joined(() if part.memory is not None else file_stamp(part.path) for part, _ in parts)
