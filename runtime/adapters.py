"""The adapters that the engine knows, and their way into the device's stacks."""
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..compiler.recipe import Recipe, materialize
from ..graphs.adapter import Adapter, load_adapter
from ..graphs.config import LlamaConfig
from ..graphs.lora import LoraShape
from ..graphs.stack import slot_tensors
from .errors import RequestError

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class KnownAdapter:
    """A registered adapter: its number in plans, and what was read from disk."""

    number: int
    name: str
    path: Path
    adapter: Adapter


def check_name(name: str) -> None:
    """Raises RequestError unless `name` may name an adapter."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"adapter name {name!r} must be 1 to 128 letters, digits, dots, underscores or hyphens; rename it")


class AdapterRegistry:
    """Name -> adapter. `numbers` (name -> number) is what the scheduler sees; a number is never used twice, so a reloaded adapter is a new one."""

    def __init__(self, config: LlamaConfig, max_rank: int) -> None:
        self.config = config
        self.max_rank = max_rank
        self.numbers: dict[str, int] = {}
        self._by_number: dict[int, KnownAdapter] = {}
        self._next = 0

    def add(self, name: str, path: str | Path) -> KnownAdapter:
        """Read and check a PEFT adapter's directory. Raises RequestError for a bad or used name, AdapterError for a directory that cannot be served."""
        check_name(name)
        if name in self.numbers:
            raise RequestError(f"adapter {name!r} is there already; remove it first or choose another name")
        known = KnownAdapter(self._next, name, Path(path), load_adapter(path, self.config, self.max_rank))
        self._next += 1
        self.numbers[name] = known.number
        self._by_number[known.number] = known
        return known

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        self.require(name)
        del self._by_number[self.numbers.pop(name)]

    def require(self, name: str) -> None:
        """Raises RequestError for a name that is not registered."""
        if name not in self.numbers:
            known = ", ".join(sorted(self.numbers)) or "none"
            raise RequestError(f"adapter {name!r} is not known; known: {known}; give it to LLM(adapters={{{name!r}: path}}) or add_adapter")

    def by_number(self, number: int) -> KnownAdapter:
        """The adapter that a plan means."""
        return self._by_number[number]

    @property
    def adapters(self) -> list[Adapter]:
        """Everything registered."""
        return [known.adapter for known in self._by_number.values()]


class AdapterStacks:
    """The stacks [S, ...] on the device, and adapters made ready for them in host memory (the most recently used ones are kept).

    `recipes`: stack name -> how one adapter's own A and B tensors become its slot (packed projections lie in one stack).
    """

    def __init__(self, recipes: Mapping[str, Recipe], stacks: Mapping[str, torch.Tensor], registry: AdapterRegistry, lora: LoraShape, keep: int) -> None:
        self.stacks = dict(stacks)
        self.lora = lora
        self._recipes = dict(recipes)
        self._registry = registry
        self._keep = keep
        self._ready: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    def prepare(self, number: int) -> dict[str, torch.Tensor]:
        """One adapter's slot of every stack, in host memory (pinned beside a GPU)."""
        if number in self._ready:
            self._ready.move_to_end(number)
            return self._ready[number]
        dtype, device = next((stack.dtype, stack.device) for stack in self.stacks.values())
        tensors = slot_tensors(self._registry.by_number(number).adapter, self._registry.config, self.lora, dtype)
        memo: dict[Recipe, Any] = {}
        ready = {name: materialize(recipe, lambda source: tensors[source].unsqueeze(0), memo)[0].contiguous() for name, recipe in self._recipes.items()}
        if device.type == "cuda":
            ready = {name: tensor.pin_memory() for name, tensor in ready.items()}
        self._ready[number] = ready
        while len(self._ready) > self._keep:
            self._ready.popitem(last=False)
        return ready

    def load(self, slot: int, number: int) -> None:
        """Copy an adapter into a slot, in stream order."""
        for name, tensor in self.prepare(number).items():
            self.stacks[name][slot].copy_(tensor, non_blocking=True)

    def forget(self, number: int) -> None:
        """Drop a removed adapter's host copy."""
        self._ready.pop(number, None)
