"""Adapter: one PEFT LoRA adapter read from disk, checked against its config and against the base; what cannot be
served exactly is refused by name.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch

from .adapter_config import AdapterError
from .adapter_description import AGAIN, WEIGHTS, Description, describe_adapter
from .adapter_file import AdapterFile, readers
from .config import LlamaConfig
from .head_layout import arranged
from .safetensors_file import FLOATING

MODULES_AT_ONCE = 14
_log = logging.getLogger("sidestream")
Recall = Callable[[str], str | None]


class Describe(Protocol):
    """`describe_adapter`, or another process that does it."""

    def __call__(
        self, directory: Path, config: LlamaConfig, max_rank: int, lenient: bool, roots: Sequence[Path] | None, /
    ) -> Description:
        """See `describe_adapter`."""
        ...


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, nameless. Per module (`model.layers.0.self_attn.q_proj`): `tensors` A [r, in] and B [out, r] as
    stored (heads as the graph has them), and the `scaling` of B A.

    `rank` is the largest r; `targets` the projections that occur (`q_proj`, ...), in Llama's order. `content_hash`
    (sha256, hex) covers everything that affects outputs: same hash, same outputs. `differences` says where the tensors
    and adapter_config.json disagree (the tensors are what is served). `source` (sha256, hex) covers everything that was
    read, the file's layout included: same source, same `content_hash`. `draft`: the adapter that it has for a trained
    draft, which changes no output; its content counts in the hash all the same.
    """

    rank: int
    scaling: dict[str, float]
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    targets: tuple[str, ...]
    content_hash: str
    differences: tuple[str, ...] = ()
    source: str = ""
    draft: "Adapter | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes of all A and B as stored."""
        return sum(tensor.nbytes for pair in self.tensors.values() for tensor in pair)


def load_adapter(
    path: str | Path,
    config: LlamaConfig,
    max_rank: int,
    lenient: bool = False,
    recall: Recall | None = None,
    roots: Sequence[Path] | None = None,
    describe: Describe = describe_adapter,
) -> Adapter:
    """Reads the PEFT adapter in directory `path` for the base that `config` describes.

    `max_rank`: the largest rank allowed. `lenient`: unknown fields of adapter_config.json are ignored instead of
    refused. `recall`: given a `source`, the content hash that an earlier call found for it, or None; where it knows
    one, the values are not looked at again and `tensors` stays empty. `roots`: resolved directories under one of which
    every file must lie, after all links; None: anywhere. `describe`: who reads the config and the weights' header.
    Raises AdapterError as `describe_adapter` does, and for values that are no numbers.
    """
    directory = Path(path)
    found = describe(directory, config, max_rank, lenient, roots)
    with AdapterFile(directory / WEIGHTS, AdapterError, AGAIN, found.layout, roots) as file:
        file.read()
    source = hashlib.sha256(f"{found.settings_sum}\n{config!r}\n{file.digest}".encode()).hexdigest()
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    content_hash = recall(source) if recall is not None else None
    if content_hash is None:
        file.check_values()
        content_hash = _content_hash(file, found)
        for module, (first, second) in found.pairs.items():
            a, b = file.tensor(first), file.tensor(second)
            for part, row, end in config.parts_of(module):
                tensors[part] = arranged(config, part, "lora_a", a), arranged(config, part, "lora_b", b[row:end])
    for difference in found.differences:
        _log.warning("adapter %r: %s", directory.name, difference)
    return Adapter(
        rank=max(map(found.rank, found.pairs)),
        scaling={part: found.scaling[module] for module in found.pairs for part, *_ in config.parts_of(module)},
        tensors=tensors,
        targets=tuple(
            name
            for name in config.projections
            if any(part.endswith(f".{name}") for module in found.pairs for part, *_ in config.parts_of(module))
        ),
        content_hash=content_hash,
        differences=found.differences,
        source=source,
    )


def _content_hash(file: AdapterFile, found: Description) -> str:
    """One digest a module, made on some threads, and the digest of those."""

    def digest(module: str) -> bytes:
        digest = hashlib.sha256(f"{module} {found.scaling[module]!r}\n".encode())
        for name in found.pairs[module]:
            place = found.layout.places[name]
            digest.update(f"{FLOATING[place.dtype]} {list(place.shape)}\n".encode())
            digest.update(file.data(name).data)
        return digest.digest()

    modules = list(found.pairs)
    parts = [modules[first : first + MODULES_AT_ONCE] for first in range(0, len(modules), MODULES_AT_ONCE)]
    digests = chain.from_iterable(readers().map(lambda part: [digest(module) for module in part], parts))
    return hashlib.sha256(b"".join(digests)).hexdigest()
