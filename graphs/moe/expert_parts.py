"""Experts of a checkpoint as the weights of a graph: stored names, and weights that are put together from experts.

The graph has one weight [E, N, K] for each linear of a layer's experts. Checkpoints store it whole, as transformers 5
and Granite do, or one tensor for each expert's gate, up and down.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import torch

from ..config import LlamaConfig
from ..families import EXPERT_SPELLINGS, MLP_MODULES
from ..files.safetensors_file import SafetensorsFile

_LAYER = r"(model\.layers\.\d+)\."
_WHOLE = [
    (re.compile(_LAYER + stored), name)
    for stored, name in (
        (r"(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)", r"\1.mlp.experts.\2.weight"),
        (r"block_sparse_moe\.input_linear\.weight", r"\1.mlp.experts.gate_up_proj.weight"),
        (r"block_sparse_moe\.output_linear\.weight", r"\1.mlp.experts.down_proj.weight"),
        (r"block_sparse_moe\.(?:gate|router|router\.layer)\.weight", r"\1.mlp.gate.weight"),
    )
]
"""Patterns of tensors that are stored as the graph has them, and their names in the graph."""
_PARTS = {name: place for _, names in EXPERT_SPELLINGS for place, name in enumerate(names)}
_PART_PATTERN = re.compile(
    _LAYER + rf"({'|'.join(home for home, _ in EXPERT_SPELLINGS)})\.experts\.(0|[1-9]\d{{0,5}})\."
    rf"({'|'.join(_PARTS)})\.(weight|weight_scale)"
)
_OWN_CONFIG = "use the config.json of these weights"
Part = tuple[SafetensorsFile, str]
"""A stored tensor: its file and its name there."""


@dataclass(frozen=True)
class ExpertStack:
    """A weight [E, N, K] that is stored in parts. `to` reads one part at a time, so only the result is in memory.

    experts  the n stored tensors [N / n, K] of each expert: gate and up, or one
    window   (first, end) of each dimension, for `narrow`
    """

    experts: tuple[tuple[Part, ...], ...]
    window: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the three dimensions."""
        return tuple(end - first for first, end in self.window)

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype, the same for all parts."""
        file, name = self.experts[0][0]
        return file.tensor(name).dtype

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Return elements `start` to `start + length` of a dimension, as torch does."""
        first = self.window[dim][0] + start
        return replace(self, window=(*self.window[:dim], (first, first + length), *self.window[dim + 1 :]))

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor on `device`; its parts are moved there one by one."""
        result = torch.empty(self.shape, dtype=dtype or self.dtype, device=device)
        for place, part in self.parts():
            result[place].copy_(part)
        return result

    def parts(self) -> Iterator[tuple[tuple[int, slice], torch.Tensor]]:
        """Yield (place in the tensor, values) for each part within the window."""
        (first, end), (top, bottom), columns = self.window
        for expert in range(first, end):
            row = 0
            for file, name in self.experts[expert]:
                rows = file.shapes[name][0]
                start, stop = max(row, top), min(row + rows, bottom)
                if start < stop:
                    part = file.tensor(name)[start - row : stop - row, slice(*columns)]
                    yield (expert - first, slice(start - top, stop - top)), part
                row += rows


def graph_tensors(
    config: LlamaConfig, stored: Mapping[str, SafetensorsFile], where: str
) -> dict[str, Part | ExpertStack]:
    """Return the tensors of a sparse model by their names in the graph, in file order; others keep their names.

    stored  the file of each stored tensor
    where   the files, for messages

    Raises the files' error if an expert is missing, is stored twice, or has a shape or a dtype that does not fit.
    """
    found: dict[str, dict[tuple[int, int] | None, Part]] = {}
    for name, file in stored.items():
        graph_name, place = _placed(name, config.num_experts)
        held = found.setdefault(graph_name, {})
        first = next(iter(held.values())) if held and (place is None or None in held) else held.get(place)
        if first is not None:
            raise file.error(
                f"{file.path.name}: tensor {name!r} is stored twice, also as {first[1]!r} in {first[0].path.name}: "
                "remove one"
            )
        held[place] = file, name
    return {name: held[None] if None in held else _stack(config, name, held, where) for name, held in found.items()}


def _placed(name: str, experts: int) -> tuple[str, tuple[int, int] | None]:
    """Return (name in the graph, (expert, part) or None for a whole tensor) of a stored tensor."""
    part = _PART_PATTERN.fullmatch(name)
    if part is not None and int(part[3]) < experts:
        place = _PARTS[part[4]]
        linear = "down_proj" if place == len(MLP_MODULES) - 1 else "gate_up_proj"
        return f"{part[1]}.mlp.experts.{linear}.{part[5]}", (int(part[3]), place if linear == "gate_up_proj" else 0)
    for pattern, replacement in _WHOLE:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name), None
    return name, None


def _stack(config: LlamaConfig, name: str, held: Mapping[Any, Part], where: str) -> ExpertStack:
    """Return a weight from its parts, which are checked."""
    module, _, kind = name.rpartition(".")
    places = slice(2, 3) if module.endswith("down_proj") else slice(0, 2)
    rows, columns = config.module_shape(f"{module.rpartition('.')[0]}.{MLP_MODULES[places.start]}")
    shape = rows, 1 if kind == "weight_scale" else columns
    (some, spelled), dtype = next((part, part[0].dtypes[part[1]]) for part in held.values())
    home, _, tail = spelled.partition(".experts.")
    spelling: tuple[str, ...] = next(each for _, each in EXPERT_SPELLINGS if tail.split(".")[1] in each)
    names = spelling[places]
    parts = []
    for expert, number in product(range(config.num_experts), range(len(names))):
        if (expert, number) not in held:
            missing = f"{home}.experts.{expert}.{names[number]}.{kind}"
            raise some.error(
                f"tensor {missing!r} is missing from {where}, and config.json has {config.num_experts} experts: "
                f"{some.remedy}"
            )
        file, stored = part = held[expert, number]
        problem = ""
        if file.shapes[stored] != shape:
            problem = f"has shape {list(file.shapes[stored])}, config.json implies {list(shape)}"
        elif file.dtypes[stored] != dtype:
            problem = f"has dtype {file.dtypes[stored]}, but {spelled!r} of the same layer has {dtype}"
        if problem:
            raise file.error(f"{file.path.name}: tensor {stored!r} {problem}: {_OWN_CONFIG}")
        parts.append(part)
    count = len(names)
    experts = tuple(tuple(parts[first : first + count]) for first in range(0, len(parts), count))
    return ExpertStack(experts, ((0, config.num_experts), (0, count * rows), (0, shape[1])))
