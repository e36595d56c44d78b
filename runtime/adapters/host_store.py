"""Cache of adapters in host memory, packed as their slots, page-locked for a GPU."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch

from ...compiler.graph.recipe import Recipe
from ...graphs.adapter import Adapter
from ...graphs.draft.config import LAYER
from ...graphs.lora import LoraShape
from ...graphs.lora_stacks import check_fits, slot_stack
from .background_jobs import BackgroundJobs
from .base_weights import BaseWeights
from .disk_cache import packing_key, slot_key
from .host_memory import Block
from .packing import GPU_GROUP_ELEMENTS, GROUP_ELEMENTS, Packer
from .registry import AdapterRegistry

NO_DRAFT_LORA = Adapter(0, {}, {}, (), "")


class HostStore:
    """LRU cache of at most `max_adapters` adapters; thread-safe.

    recipes       stack name -> recipe that computes the stack's slot from an adapter's A and B
    constants     tensors of a calibration, which recipes may also use
    base          the model's weights, for adapters with parts that depend on them
    device_calls  context manager held while memory is page-locked, in chunks while `steps_running`

    Blocks are reused. A block that is in use is never assigned to another adapter. On a GPU the next adapter's block is
    page-locked in advance.
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        stacks: Mapping[str, torch.Tensor],
        registry: AdapterRegistry,
        lora: LoraShape,
        max_adapters: int,
        device_calls: Any,
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
        base: BaseWeights | None = None,
    ) -> None:
        self._base = base
        self.disk_cache = registry.disk_cache
        self.steps_running = False
        self._registry, self._recipes, self._lora = registry, recipes, lora
        self._max_adapters = max(1, max_adapters)
        self._device_calls = device_calls
        dtypes = {stack.dtype for stack in stacks.values()}
        # dtype of the recipes' inputs; scales, gains and shifts are fp32
        narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
        self._dtype = torch.bfloat16 if narrow.itemsize == 1 else narrow
        device = next(iter(stacks.values())).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._page_locks = self._stream is not None
        self._shapes = [(tuple(stacks[name].shape[1:]), stacks[name].dtype) for name in recipes]
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._free: list[Block] = []
        self._num_blocks = 0
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._jobs = BackgroundJobs("adapter-blocks", idle_seconds=0.0)
        elements = GROUP_ELEMENTS if self._stream is None else GPU_GROUP_ELEMENTS
        self._packer = Packer(recipes, [shape for shape, _ in self._shapes], elements)
        sources = frozenset[str]().union(*(recipe.sources() for recipe in recipes.values()))
        self._constants = {name: constants[name].cpu() for name in sorted(sources & constants.keys())}

    @property
    def numbers(self) -> list[int]:
        """The cached adapters, least recently used first."""
        with self._lock:
            return list(self._blocks)

    def acquire(self, number: int) -> Block | None:
        """Return the adapter's block, if cached; it stays valid until `release`."""
        with self._lock:
            block = self._blocks.get(number)
            if block is not None:
                self._blocks.move_to_end(number)
                block.num_users += 1
            return block

    def release(self, block: Block) -> None:
        """Undo one `acquire`."""
        with self._lock:
            block.num_users -= 1
            # blocks in use may have exceeded the limit
            while self._num_blocks > self._max_adapters and (victim := self._victim()) is not None:
                del self._blocks[victim]
                self._num_blocks -= 1

    def prepare(self, number: int) -> Block:
        """Acquire and return the adapter's block; load or pack it if needed. Raises AdapterError or OSError."""
        with self._preparing:
            block = self.acquire(number)
            if block is not None:
                return block
            key = self._cache_key(number)
            adapter = None if key else self._read(number)
            block = self._allocate()
            try:
                if adapter is None and not self._load(key, block):
                    adapter = self._read(number)
                if self._page_locks and not block.locked:
                    block.page_lock(self._device_calls, self.steps_running)
                if adapter is not None:
                    self._pack(adapter, block)
            except BaseException as error:
                if isinstance(error, MemoryError):
                    self._num_blocks -= 1  # partly page-locked: cannot be reused
                else:
                    self._free.append(block)
                raise
            if adapter is None:
                self._registry.discard_tensors(number)
            with self._lock:
                block.num_users = 1
                if self._registry.is_in_use(number):
                    self._blocks[number] = block
                else:
                    self._num_blocks -= 1  # dropped meanwhile: freed after its copies
            # updates replace each other within seconds
            if self.disk_cache is not None and adapter is not None and not self._registry.is_update(number):
                store, content_hash = weakref.ref(self), adapter.content_hash
                self.disk_cache.jobs.submit(lambda stopped: _write_to_disk(store, number, content_hash, stopped))
            if self._page_locks:
                owner = weakref.ref(self)
                self._jobs.submit(lambda stopped: _lock_spare_block(owner))
            return block

    def lock_spare_block(self) -> None:
        """Page-lock a free block, unless there is one or `max_adapters` is reached. Raises MemoryError."""
        with self._lock:
            if self._free or self._num_blocks >= self._max_adapters:
                return
            self._num_blocks += 1
        block = Block(self._shapes)
        try:
            block.bytes.fill(0)  # allocates its pages
            block.page_lock(self._device_calls, self.steps_running)
        except BaseException:
            with self._lock:
                self._num_blocks -= 1
            raise
        with self._lock:
            self._free.append(block)

    def write_to_disk(self, number: int, content_hash: str, stopped: threading.Event | None = None) -> None:
        """Write the adapter's block to the disk cache unless it is there. Raises JobCancelled once `stopped` is set."""
        with self._lock:
            block = self._blocks.get(number)
            if block is None or self.disk_cache is None:
                return
            block.num_users += 1
        try:
            key = slot_key(self._packing_key, content_hash)
            if not self.disk_cache.has(key):
                self.disk_cache.save(key, block.bytes, stopped)
        finally:
            self.release(block)

    @cached_property
    def _packing_key(self) -> str:
        base = self._base.stamp if self._base is not None and self._lora.parts else ""
        registry = self._registry
        settings = registry.config, self._lora, self._constants, base
        processor = "" if self._stream is None else torch.cuda.get_device_name(self._stream.device)
        return packing_key(self._recipes, self._shapes, self._dtype, *settings, processor)

    def _cache_key(self, number: int) -> str | None:
        """Return the adapter's key in the disk cache; None if absent, for updates, or if its files may have changed."""
        registry = self._registry
        if self.disk_cache is None or registry.is_update(number) or not registry.is_unchanged(number):
            return None
        self.disk_cache.jobs.postpone()
        key = slot_key(self._packing_key, self._registry.by_number(number).content_hash)
        return key if self.disk_cache.has(key) else None

    def _load(self, key: str | None, block: Block) -> bool:
        """Fill a block from the disk cache; after a failure zero it, padding included."""
        if key is not None and self.disk_cache is not None and self.disk_cache.load(key, block.bytes):
            return True
        block.bytes.fill(0)
        return False

    def _read(self, number: int) -> Adapter:
        adapter = self._registry.read(number)
        check_fits(adapter, self._lora)
        return adapter if self._base is None else self._base.resolved(adapter, self._device_calls)

    def _pack(self, adapter: Adapter, block: Block) -> None:
        def lookup(device: torch.device, names: Sequence[str]) -> torch.Tensor:
            if names[0] in self._constants:
                return torch.stack([self._constants[name] for name in names])
            registry = self._registry
            if names[0].startswith(LAYER) and registry.draft is not None and registry.draft_lora is not None:
                draft = adapter.draft or NO_DRAFT_LORA
                return slot_stack(draft, registry.draft, registry.draft_lora, names, self._dtype, device)
            return slot_stack(adapter, registry.config, self._lora, names, self._dtype, device)

        if self._stream is not None:
            self._packer.pack_on_gpu(lookup, block.fill, self._stream, self._device_calls)
        else:
            self._packer.pack(partial(lookup, torch.device("cpu")), block.tensors)

    def drop(self, number: int) -> None:
        """Free the block of an adapter that the registry has dropped."""
        with self._lock:
            block = self._blocks.pop(number, None)
            if block is not None and not block.num_users:
                self._free.append(block)
            elif block is not None:
                self._num_blocks -= 1  # freed after its copies

    def _allocate(self) -> Block:
        with self._lock:
            if self._free:
                return self._free.pop()
            victim = self._victim() if self._num_blocks >= self._max_adapters else None
            if victim is not None:
                return self._blocks.pop(victim)
            self._num_blocks += 1
        return Block(self._shapes)

    def _victim(self) -> int | None:
        return next((number for number, block in self._blocks.items() if not block.num_users), None)


def _write_to_disk(owner: "weakref.ref[HostStore]", number: int, content_hash: str, stopped: threading.Event) -> None:
    """Run a job that does not keep the store alive while it is queued."""
    store = owner()
    if store is not None:
        store.write_to_disk(number, content_hash, stopped)


def _lock_spare_block(owner: "weakref.ref[HostStore]") -> None:
    store = owner()
    if store is not None:
        store.lock_spare_block()
