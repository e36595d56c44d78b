"""The model and adapters in the GPU process.

A restarted process also serves the adapters that clients loaded before, and leaves out those that cannot be read.
"""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

from msgspec import structs

from ...ops.core.kv_layout import PAGE_SIZE
from ..adapters.remote_adapter import copies_folder, copy_adapter, is_remote, remote_address
from ..api.adapter_sum import SUM_PATH
from ..api.adapter_versions import AdapterVersion, names_to_remove, version_name
from ..protocol.adapter_map import AdapterEntry
from ..protocol.messages import MAX_CHUNK_LOGPROBS
from ..scheduler.step_plan import Runner
from ..text.prompts import most_logprobs
from .gpu_link import LOST_UPDATE, LoadedAdapter, Ready, Update, changed_files
from .settings import ServeSettings
from .updates.files import UpdateFiles

_log = logging.getLogger(__name__)
EXIT_DEVICE_LOST = 70
"""Exit code when the device's context or another tensor-parallel process is lost."""


class Servable(Protocol):
    """What the GPU process serves. Adapter methods raise ValueError or OSError with a text for the client."""

    ready: Ready

    @property
    def runner(self) -> Runner: ...

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        """Read an adapter's directory."""
        ...

    def update_adapter(self, update: Update) -> tuple[LoadedAdapter, list[str]]:
        """Copy, check and pack an update. Return its version, and the names that are gone."""
        ...

    def restore_update(self, update: AdapterVersion) -> LoadedAdapter:
        """Read a version again that a former process has copied."""
        ...

    def add_sum(self, number: int, parts: list[tuple[int, float]]) -> None:
        """Register a sum of adapters, see `AdapterRegistry.add_sum`."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter's name; the batcher reports when no request uses it any more."""
        ...

    def in_host_memory(self) -> list[int]:
        """Return the numbers of the adapters in host memory."""
        ...


class ServedModel:
    """A model on this device; see `Servable`. Raises the errors of `find_model` and `load_model`."""

    def __init__(self, settings: ServeSettings) -> None:
        # imported here: a GPU process that simulates a model needs no torch
        from ..adapters.adapter_limits import readable_adapters
        from ..adapters.describer import AdapterDescriber
        from ..engine.resolve import PageTransfer
        from ..worker.model_loader import find_model
        from ..worker.tensor_parallel.parallel_model import load_parallel_model

        source, options = find_model(settings.model, **settings.llm)
        if settings.kv_role:
            options = replace(options, transfer=PageTransfer(settings.kv_role, settings.kv_sources))
        describe = AdapterDescriber()
        # at a restart they were readable before
        optional = {
            name: path for name, path in settings.adapters.items() if settings.generation or settings.is_in_folder(path)
        }
        base = None if options.dummy else source.directory
        readable, refused = readable_adapters(source.config, optional, options.engine, describe, base)
        adapters = {name: path for name, path in settings.adapters.items() if name in readable or name not in optional}
        self._model = model = load_parallel_model(settings.model, source, adapters, options, settings.llm, describe)
        self.runner: Runner = model.executor
        model.on_lost(_end_process)
        model.identify_pages()
        model.runner.build_in_background()
        # only for adapters that clients load later
        local = [root for root in settings.adapter_roots if not is_remote(root)]
        model.restrict_adapters([*local, str(copies_folder())] if len(local) < len(settings.adapter_roots) else local)
        self._roots = settings.adapter_roots
        self._updates = UpdateFiles(Path(settings.directory, "updates"))
        limits = model.limits
        self.ready = Ready(
            vocabulary=model.source.config.vocab_size,
            num_pages=limits.num_pages,
            page_size=PAGE_SIZE,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_slots=limits.num_slots,
            eos_ids=sorted(model.eos_ids),
            adapters=[self._loaded(number) for number in model.registry.numbers.values()],
            device=str(options.device),
            prefix_caching=limits.prefix_caching,
            speculation=limits.speculation,
            step_times=list(limits.step_times),
            speculation_history=limits.speculation_history,
            host_pages=limits.host_pages,
            disk_pages=limits.disk_pages,
            disk_prefix=limits.disk_prefix,
            exact=limits.exact,
            cascade_tile=limits.cascade_tile,
            cascade_pages=limits.cascade_pages,
            kv_role=limits.kv_role,
            longest_step=model.longest_step,
            lora_rank=0 if model.registry.lora is None else model.registry.lora.rank,
            expert_rank=0 if model.registry.lora is None else model.registry.lora.expert_rank,
            lora_targets=[] if model.registry.lora is None else list(model.registry.lora.targets),
            lora_parts=[] if model.registry.lora is None else list(model.registry.lora.parts),
            max_adapter_sums=options.engine.max_adapter_sums,
            numerics=model.numerics,
            dtype=str(model.compiled.options.model_dtype),
            logprobs_mode=options.engine.logprobs_mode,
            max_logprobs=min(
                most_logprobs(options.engine.max_logprobs, model.source.config.vocab_size), MAX_CHUNK_LOGPROBS
            ),
            left_out={name: _log_left_out(problem, name) for name, problem in refused.items()},
        )

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        address = remote_address(path, self._roots)
        if address is not None:
            path = str(copy_adapter(name, address, copies_folder()))
        before = list(self._model.registry.numbers)
        adapter = self._model.add_adapter(name, path, replace)
        self._updates.remove(names_to_remove(name, before))
        return self._loaded(adapter.number)

    def update_adapter(self, update: Update) -> tuple[LoadedAdapter, list[str]]:
        registry = self._model.registry
        before = list(registry.numbers)
        with self._updates.copied(update.path, update.nbytes) as file:
            made, _ = self._model.update_adapter(update.name, file, update.version, update.switch)
            try:
                file.complete()
                self._updates.keep(made.name)
            except OSError as problem:  # it is served, but not by the next process
                _log.warning("adapter %r: its update is lost if this process ends: %s", made.name, problem)
        removed = [name for name in before if name not in registry.numbers]
        self._updates.remove(removed)
        return self._loaded(made.number), removed

    def restore_update(self, update: AdapterVersion) -> LoadedAdapter:
        with self._updates.opened(version_name(update.name, update.version)) as file:
            made, _ = self._model.update_adapter(update.name, file, update.version)
        return self._loaded(made.number)

    def add_sum(self, number: int, parts: list[tuple[int, float]]) -> None:
        self._model.add_sum(number, parts)

    def remove_adapter(self, name: str) -> None:
        names = names_to_remove(name, self._model.registry.numbers)
        for each in names:
            self._model.remove_adapter(each)
        self._updates.remove(names)

    def in_host_memory(self) -> list[int]:
        return self._model.runner.in_host_memory()

    def _loaded(self, number: int) -> LoadedAdapter:
        from ..adapters.weighted_sum import sum_obstacle

        entry = self._model.registry.by_number(number)
        adapter = entry.adapter
        return LoadedAdapter(
            entry.name,
            entry.number,
            adapter.rank or adapter.expert_rank,
            entry.content_hash,
            entry.chat,
            adapter.invocation,
            sum_obstacle(adapter),
        )


def load_again(served: Servable, loaded: Iterable[AdapterEntry], updates: Iterable[AdapterVersion] = ()) -> Ready:
    """Read the adapters that clients loaded into a former process, and the versions of those that they updated there,
    oldest first. Returns the extended `Ready`.

    Raises errors that lose the device or another tensor-parallel process. Other errors, and files that have changed,
    leave the adapter out.
    """
    loaded = list(loaded)
    adapters = {adapter.name: adapter for adapter in served.ready.adapters}
    left_out = dict(served.ready.left_out)
    for entry in loaded:
        if entry.path is None:
            continue
        try:
            if adapters.pop(entry.name, None) is not None:  # the version of the command line
                served.remove_adapter(entry.name)
            if entry.path.startswith(SUM_PATH) or entry.is_update:  # the batcher has it, or it follows
                continue
            adapter = served.add_adapter(entry.name, entry.path, False)
            if adapter.content != entry.content:
                served.remove_adapter(entry.name)
                raise ValueError(changed_files(entry.name))
            adapters[entry.name] = adapter
        except Exception as problem:
            if is_fatal(problem):
                raise
            left_out[entry.name] = _log_left_out(problem, entry.name)
    _restore_updates(served, [entry for entry in loaded if entry.is_update], list(updates), adapters, left_out)
    return structs.replace(served.ready, adapters=list(adapters.values()), left_out=left_out)


def _restore_updates(
    served: Servable,
    newest: list[AdapterEntry],
    updates: list[AdapterVersion],
    adapters: dict[str, LoadedAdapter],
    left_out: dict[str, str],
) -> None:
    """Add the versions of updated adapters to `adapters`; all versions of an adapter, or none."""
    for entry in newest:
        own = [update for update in updates if update.name == entry.name]
        restored: dict[str, LoadedAdapter] = {}
        try:
            for update in own:
                version = served.restore_update(update)
                restored |= {version.name: version, entry.name: structs.replace(version, name=entry.name)}
                if version.content != update.content:
                    raise ValueError(LOST_UPDATE)
            if not own or own[-1].content != entry.content:
                raise ValueError(LOST_UPDATE)
            adapters |= restored
        except Exception as problem:
            if is_fatal(problem):
                raise
            if restored:
                served.remove_adapter(entry.name)
            _log_left_out(problem, entry.name)
            names = [version_name(update.name, update.version) for update in own]
            left_out |= dict.fromkeys([entry.name, *names], LOST_UPDATE)


def _log_left_out(problem: Exception, adapter: str) -> str:
    """Log that an adapter is left out and return the text for clients."""
    _log.warning("adapter %r is left out: %s", adapter, " ".join(str(problem).split()))
    return text_for_client(problem, adapter)


def is_fatal(error: Exception) -> bool:
    """Return whether the device's context or another tensor-parallel process is lost: later steps would fail too."""
    text = str(error)
    return type(error).__name__ in ("AcceleratorError", "RankError") or (
        "CUDA error" in text and "out of memory" not in text
    )


def text_for_client(error: Exception, adapter: str) -> str:
    """Return the text of an adapter's error for clients. Logs errors that are not the adapter's fault."""
    if isinstance(error, OSError):
        return f"adapter {adapter!r}: {error.strerror or 'its files cannot be read'}"
    if isinstance(error, ValueError):
        return without_directories(str(error))
    _log.error("adapter %r", adapter, exc_info=error)
    return f"adapter {adapter!r}: an error in the engine; see its log"


def without_directories(text: str) -> str:
    """Return a text with only the last part of each path: clients must not learn this machine's directories."""
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)*", "", text)


def _end_process(problem: str) -> NoReturn:
    """End this process after another tensor-parallel process was lost, since the main thread may wait in a kernel."""
    _log.error("%s", problem)
    os._exit(EXIT_DEVICE_LOST)
