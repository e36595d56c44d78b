"""What the GPU process of `sidestream serve` serves: an `LLM`'s runner and its adapters.

Its own scheduler stays idle, for the batcher has one.
"""

from ...ops.core.kv_layout import PAGE_SIZE
from ..device.runner import ModelRunner
from ..llm import LLM
from .gpu_link import LoadedAdapter, Ready
from .settings import ServeSettings


class ServedLLM:
    """See `gpu_process.Served`. Raises what `LLM` raises."""

    def __init__(self, settings: ServeSettings) -> None:
        self._llm = llm = LLM(settings.model, settings.adapters, **settings.llm)
        self.runner: ModelRunner = llm.engine.runner  # type: ignore[assignment]
        llm.registry.restrict(
            settings.adapter_roots
        )  # for what clients load; the adapters of the start may lie anywhere
        limits = llm.engine.scheduler.limits
        self.ready = Ready(
            vocabulary=llm.config.vocab_size,
            num_pages=limits.num_pages,
            page_size=PAGE_SIZE,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_slots=limits.num_slots,
            eos_ids=sorted(llm.engine.eos_ids),
            adapters=[self._loaded(name) for name in llm.registry.numbers],
            device=str(llm.device),
            seconds=dict(llm.seconds),
            prefix_caching=limits.prefix_caching,
        )

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        """See `LLM.add_adapter`."""
        self._llm.add_adapter(name, path, replace)
        return self._loaded(name)

    def remove_adapter(self, name: str) -> None:
        """See `LLM.remove_adapter`."""
        self._llm.remove_adapter(name)

    def in_host_memory(self) -> list[int]:
        """See `ModelRunner.in_host_memory`."""
        return self.runner.in_host_memory()

    def _loaded(self, name: str) -> LoadedAdapter:
        known = self._llm.registry.by_number(self._llm.registry.numbers[name])
        return LoadedAdapter(name, known.number, known.adapter.rank, known.content_hash)
