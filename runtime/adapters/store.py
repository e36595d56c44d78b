"""Adapters in host memory, laid out as their slots: one block each, page-locked for a GPU, so that a copy needs no
further work.
"""

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from ...compiler.graph.recipe import Recipe
from ...graphs.adapter import Adapter
from ...graphs.draft.config import LAYER
from ...graphs.lora import LoraShape
from ...graphs.stack import check_fits, slot_tensor
from .disk_cache import packing_key, slot_key
from .host_memory import host_bytes, page_lock
from .packing import Packing
from .registry import AdapterRegistry

ALIGNMENT = 4096
"""A page of the operating system: page-locking one tensor must not touch its neighbours."""
NOTHING = Adapter(0, {}, {}, (), "")
"""In place of the LoRA of the draft that an adapter lacks."""
LOCK_PAUSE = 0.0002
PIECE = 1 << 20
"""Bytes that are page-locked, and copied, at a time: a step cannot be launched during a call that locks pages."""


def block_starts(sizes: Sequence[int]) -> list[int]:
    """Where tensors of so many bytes begin in a block, and where it ends."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


class Block:
    """One adapter's slot of every stack, in the stacks' order:

    `tensors` and numpy's `bytes` are views of one contiguous piece of memory.
    """

    def __init__(self, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        starts = block_starts(sizes)
        self.memory = host_bytes(starts[-1])
        self.bytes = self.memory.numpy()
        self.tensors = [
            self.memory[first : first + size].view(dtype).view(shape)
            for first, size, (shape, dtype) in zip(starts, sizes, shapes, strict=False)
        ]
        self.holds = 0
        self.locked = False

    def page_lock(self, device_calls: Any, gently: bool) -> None:
        """See `host_memory.page_lock`; `gently` leaves pauses: for a whole adapter the call takes tens of
        milliseconds.
        """
        pieces = self.memory.split(PIECE if gently else self.memory.numel())
        page_lock(self, pieces, device_calls, pause=LOCK_PAUSE if gently else 0.0, remedy="lower max_cpu_loras")
        self.locked = True


class AdapterStore:
    """At most `keep` adapters, the most recently used ones; safe for several threads.

    `recipes`: stack name -> how an adapter's own A and B become its slot. Blocks are made when they are first needed
    and used again; while `use`d, a block is never given to another adapter. `device_calls` is held while memory is
    page-locked, bit by bit once `gently` is set: when steps run.

    constants   tensors of a calibration that recipes name besides an adapter's own
    cache   what is kept of packed adapters between runs (the registry's), or None
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        stacks: Mapping[str, torch.Tensor],
        registry: AdapterRegistry,
        lora: LoraShape,
        keep: int,
        device_calls: Any,
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._registry = registry
        self._lora = lora
        self._keep = max(1, keep)
        self._device_calls = device_calls
        dtypes = {stack.dtype for stack in stacks.values()}
        # of what the recipes start from: scales are fp32
        self._dtype = torch.bfloat16 if dtypes & {torch.float8_e4m3fn, torch.int8} else next(iter(dtypes))
        self._pinned = next(iter(stacks.values())).device.type == "cuda"
        self._shapes = [(tuple(stacks[name].shape[1:]), stacks[name].dtype) for name in recipes]
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._spare: list[Block] = []
        self._made = 0
        self._lock = threading.Lock()
        self.gently = False
        self._preparing = threading.Lock()
        self._packing = Packing(recipes, [shape for shape, _ in self._shapes])
        self._recipes = recipes
        sources = frozenset[str]().union(*(recipe.sources() for recipe in recipes.values()))
        self._constants = {name: constants[name].cpu() for name in sorted(sources & constants.keys())}
        self.cache = registry.cache

    @property
    def numbers(self) -> list[int]:
        """The adapters that are here, least recently used first."""
        with self._lock:
            return list(self._blocks)

    def use(self, number: int) -> Block | None:
        """The adapter's block if it is here, kept from others until `release`."""
        with self._lock:
            block = self._blocks.get(number)
            if block is not None:
                self._blocks.move_to_end(number)
                block.holds += 1
            return block

    def release(self, block: Block) -> None:
        """Undo one `use`."""
        with self._lock:
            block.holds -= 1
            # more were held at once than may be kept
            while self._made > self._keep and (victim := self._victim()) is not None:
                del self._blocks[victim]
                self._made -= 1

    def prepare(self, number: int) -> Block:
        """The adapter's block as `use` gives it; if it is not here, it is taken from the cache, else read and packed.

        Raises AdapterError or OSError.
        """
        with self._preparing:
            block = self.use(number)
            if block is not None:
                return block
            key = self._kept(number)
            adapter = None if key else self._read(number)
            block = self._take_block()
            try:
                if adapter is None and not self._load(key, block):
                    adapter = self._read(number)
                if adapter is not None:
                    self._pack(adapter, block)
                if self._pinned and not block.locked:
                    block.page_lock(self._device_calls, self.gently)
            except BaseException as error:
                if isinstance(error, MemoryError):
                    self._made -= 1  # partly page-locked: not to be used again
                else:
                    self._spare.append(block)
                raise
            if adapter is None:
                self._registry.let_go(number)
            with self._lock:
                block.holds = 1
                if self._registry.is_wanted(number):
                    self._blocks[number] = block
                else:
                    self._made -= 1  # forgotten meanwhile: it goes when its copies have ended
            if self.cache is not None and adapter is not None:
                store, content_hash = weakref.ref(self), adapter.content_hash
                self.cache.background.later(lambda stopped: _keep(store, number, content_hash, stopped))
            return block

    def keep(self, number: int, content_hash: str, stopped: threading.Event | None = None) -> None:
        """Write the adapter's block to the cache, if both are here and it is not there.

        Raises Stopped once `stopped` is set.
        """
        with self._lock:
            block = self._blocks.get(number)
            if block is None or self.cache is None:
                return
            block.holds += 1
        try:
            key = slot_key(self._packing_key, content_hash)
            if not self.cache.has(key):
                self.cache.save(key, block.bytes, stopped)
        finally:
            self.release(block)

    @cached_property
    def _packing_key(self) -> str:
        return packing_key(self._recipes, self._shapes, self._dtype, self._registry.config, self._lora, self._constants)

    def _kept(self, number: int) -> str | None:
        """The key under which the cache has the adapter, unless its files may have changed since it was registered."""
        if self.cache is None or not self._registry.is_unchanged(number):
            return None
        self.cache.background.busy()
        key = slot_key(self._packing_key, self._registry.by_number(number).content_hash)
        return key if self.cache.has(key) else None

    def _load(self, key: str | None, block: Block) -> bool:
        """Fill a block from the cache; where that fails, its padding is zeros again."""
        if key is not None and self.cache is not None and self.cache.load(key, block.bytes):
            return True
        block.bytes.fill(0)
        return False

    def _read(self, number: int) -> Adapter:
        adapter = self._registry.read(number)
        check_fits(adapter, self._lora)
        return adapter

    def _pack(self, adapter: Adapter, block: Block) -> None:
        def find(name: str) -> torch.Tensor:
            if name in self._constants:
                return self._constants[name]
            registry = self._registry
            if name.startswith(LAYER) and registry.draft is not None and registry.draft_lora is not None:
                return slot_tensor(adapter.draft or NOTHING, registry.draft, registry.draft_lora, name, self._dtype)
            return slot_tensor(adapter, registry.config, self._lora, name, self._dtype)

        self._packing.pack(find, block.tensors)

    def forget(self, number: int) -> None:
        """Drop the block of an adapter that the registry has dropped."""
        with self._lock:
            block = self._blocks.pop(number, None)
            if block is not None and not block.holds:
                self._spare.append(block)
            elif block is not None:
                self._made -= 1  # it goes when its copies have ended

    def _take_block(self) -> Block:
        with self._lock:
            if self._spare:
                return self._spare.pop()
            victim = self._victim() if self._made >= self._keep else None
            if victim is not None:
                return self._blocks.pop(victim)
            self._made += 1
        return Block(self._shapes)

    def _victim(self) -> int | None:
        return next((number for number, block in self._blocks.items() if not block.holds), None)


def _keep(owner: "weakref.ref[AdapterStore]", number: int, content_hash: str, stopped: threading.Event) -> None:
    """A job that does not keep the store alive until its turn comes."""
    store = owner()
    if store is not None:
        store.keep(number, content_hash, stopped)
