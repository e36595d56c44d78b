"""What the GPU process serves: a model and its adapters.

A process that is started again serves the adapters that clients have loaded too, and leaves out what can't be read any
more: the others are not its fault.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Protocol

from msgspec import structs

from ...ops.core.kv_layout import PAGE_SIZE
from ..scheduler.step_plan import Runner
from .gpu_link import LoadedAdapter, Ready
from .settings import ServeSettings

_log = logging.getLogger(__name__)
LOST = 70
"""The exit code when the device's context or another rank is lost."""


class Served(Protocol):
    """What the GPU process serves.

    Adapter methods raise ValueError or OSError for what cannot be done, with a text for the caller.
    """

    ready: Ready

    @property
    def runner(self) -> Runner:
        """Executes the plans."""
        ...

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        """Read an adapter's directory."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Forget a name."""
        ...

    def in_host_memory(self) -> list[int]:
        """The adapters that need not be read from disk, by number."""
        ...


class ServedModel:
    """See `Served`. Raises what `find_model` and `load_model` raise."""

    def __init__(self, settings: ServeSettings) -> None:
        # here, because a GPU process that only simulates a model needs no torch
        from ..adapters.adapter_limits import readable_adapters
        from ..adapters.describer import AdapterDescriber
        from ..worker.model_loader import find_model
        from ..worker.tensor_parallel.parallel_model import load_parallel_model

        source, options = find_model(settings.model, **settings.llm)
        describe = AdapterDescriber()
        adapters, refused = dict[str, str | Path](settings.adapters), dict[str, Exception]()
        if settings.generation:  # they could be read once
            adapters, refused = readable_adapters(source.config, adapters, options.engine, describe)
        self._model = model = load_parallel_model(settings.model, source, adapters, options, settings.llm, describe)
        self.runner: Runner = model.executor
        model.on_lost(_end_process)
        model.runner.build_in_background()
        # for what clients load; the adapters of the start may lie anywhere
        model.restrict_adapters(settings.adapter_roots)
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
            seconds=dict(model.seconds),
            prefix_caching=limits.prefix_caching,
            speculation=limits.speculation,
            step_times=list(limits.step_times),
            speculation_history=limits.speculation_history,
            longest_step=model.longest_step,
            lora_rank=0 if model.registry.lora is None else model.registry.lora.rank,
            lora_targets=[] if model.registry.lora is None else list(model.registry.lora.targets),
            left_out={name: _left_out(problem, name) for name, problem in refused.items()},
        )

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        """See `Model.add_adapter`."""
        return self._loaded(self._model.add_adapter(name, path, replace).number)

    def remove_adapter(self, name: str) -> None:
        """Forget a name; the batcher says when nothing uses the adapter any more."""
        self._model.remove_adapter(name)

    def in_host_memory(self) -> list[int]:
        """See `ModelRunner.in_host_memory`."""
        return self._model.runner.in_host_memory()

    def _loaded(self, number: int) -> LoadedAdapter:
        known = self._model.registry.by_number(number)
        return LoadedAdapter(known.name, known.number, known.adapter.rank, known.content_hash, known.chat)


def with_loaded(served: Served, loaded: Mapping[str, str]) -> Ready:
    """Read the adapters that clients had loaded into a former process (name -> directory); returns what is ready then.

    Raises what loses the device or another rank.
    """
    adapters, left_out = list(served.ready.adapters), dict(served.ready.left_out)
    for name, path in loaded.items():
        try:
            adapters.append(served.add_adapter(name, path, False))
        except Exception as problem:
            if is_fatal(problem):
                raise
            left_out[name] = _left_out(problem, name)
    return structs.replace(served.ready, adapters=adapters, left_out=left_out)


def _left_out(problem: Exception, adapter: str) -> str:
    _log.warning("adapter %r is left out: %s", adapter, " ".join(str(problem).split()))
    return for_caller(problem, adapter)


def is_fatal(error: Exception) -> bool:
    """Whether the device's context, or another rank, is lost: every later step would fail as well."""
    text = str(error)
    return type(error).__name__ in ("AcceleratorError", "RankError") or (
        "CUDA error" in text and "out of memory" not in text
    )


def for_caller(error: Exception, adapter: str) -> str:
    """What a client is told of an adapter that could not be read; a fault that is not the adapter's goes to the log."""
    if isinstance(error, OSError):
        return f"adapter {adapter!r}: {error.strerror or 'its files cannot be read'}"
    if isinstance(error, ValueError):
        return without_directories(str(error))
    _log.error("adapter %r", adapter, exc_info=error)
    return f"adapter {adapter!r}: a fault in the engine; see its log"


def without_directories(text: str) -> str:
    """A text for clients: of a path only the last part stays, for where things lie on this machine is not their
    business.
    """
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)*", "", text)


def _end_process(problem: str) -> NoReturn:
    """Another rank is lost. The main thread may wait for it inside a kernel; the supervisor starts all again."""
    _log.error("%s", problem)
    os._exit(LOST)
