"""Adapter: one PEFT LoRA adapter read from disk, checked against its config and against the base; what cannot be
served exactly is refused by name.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from .adapter_config import AdapterConfig, AdapterError
from .adapter_file import AdapterFile, readers
from .config import LlamaConfig
from .peft_patterns import LookAroundError
from .quoting import name_of
from .safetensors_file import FLOATING

WEIGHTS = "adapter_model.safetensors"
MODULES_AT_ONCE = 14
TENSORS_PER_MODULE = 3  # A and B, and room for what is refused by name
_AGAIN = "save the adapter again with peft's save_pretrained"
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_OTHER_BASE = "the adapter was trained on another base; use that one"
_EMBEDDINGS = ("embed_tokens", "lm_head")
_log = logging.getLogger("sidestream")
Recall = Callable[[str], str | None]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, nameless. Per module (`model.layers.0.self_attn.q_proj`): `tensors` A [r, in] and B [out, r] as
    stored, and the `scaling` of B A.

    `rank` is the largest r; `targets` the projections that occur (`q_proj`, ...), in Llama's order. `content_hash`
    (sha256, hex) covers everything that affects outputs: same hash, same outputs. `differences` says where the tensors
    and adapter_config.json disagree (the tensors are what is served). `source` (sha256, hex) covers everything that was
    read, the file's layout included: same source, same `content_hash`.
    """

    rank: int
    scaling: dict[str, float]
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    targets: tuple[str, ...]
    content_hash: str
    differences: tuple[str, ...] = ()
    source: str = ""

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
) -> Adapter:
    """Reads the PEFT adapter in directory `path` for the base that `config` describes.

    `max_rank`: the largest rank allowed. `lenient`: unknown fields of adapter_config.json are ignored instead of
    refused. `recall`: given a `source`, the content hash that an earlier call found for it, or None; where it knows
    one, the values are not looked at again and `tensors` stays empty. `roots`: resolved directories under one of which
    every file must lie, after all links; None: anywhere. Only safetensors are read, and only regular files. Raises
    AdapterError naming the field or tensor and the remedy; it quotes nothing else of a file.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise AdapterError(
            f"adapter directory {directory} does not exist: give the directory that holds adapter_config.json and "
            f"{WEIGHTS}"
        )
    settings = AdapterConfig.from_directory(directory, lenient, roots)
    if not (directory / WEIGHTS).exists() and (directory / "adapter_model.bin").exists():
        raise AdapterError(
            "adapter_model.bin is a pickle, which can run code and is never loaded: save the adapter again with "
            "save_pretrained(safe_serialization=True)"
        )
    most = TENSORS_PER_MODULE * len(config.linear_modules())
    with AdapterFile(directory / WEIGHTS, AdapterError, _AGAIN, most, roots) as file:
        pairs = _pairs(file, config)
        ranks = {
            module: _check_shapes(file, module, names, config, settings, max_rank) for module, names in pairs.items()
        }
        scaling = {module: settings.scaling(module, rank) for module, rank in ranks.items()}
        file.read()
    source = hashlib.sha256(f"{settings!r}\n{config!r}\n{file.digest}".encode()).hexdigest()
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    content_hash = recall(source) if recall is not None else None
    if content_hash is None:
        file.check_values()
        content_hash = _content_hash(file, pairs, scaling)
        tensors = {module: (file.tensor(names[0]), file.tensor(names[1])) for module, names in pairs.items()}
    differences = _differences(settings, config, set(pairs))
    for difference in differences:
        _log.warning("adapter %r: %s", directory.name, difference)
    return Adapter(
        rank=max(ranks.values()),
        scaling=scaling,
        tensors=tensors,
        targets=tuple(name for name in config.projections if any(module.endswith(f".{name}") for module in pairs)),
        content_hash=content_hash,
        differences=differences,
        source=source,
    )


def _pairs(file: AdapterFile, config: LlamaConfig) -> dict[str, tuple[str, str]]:
    """module -> (key of A, key of B), in the model's order. Every key must belong to such a pair."""
    sides: dict[tuple[str, str], str] = {}
    modules = config.linear_modules()
    known = set(modules)
    for key in file.shapes:
        match = _KEY.fullmatch(key)
        if match is None or match["module"] not in known:
            raise AdapterError(f"{WEIGHTS}: {_why_foreign(key, match['module'] if match else None, config)}")
        module, side = match["module"], match["side"]
        if (module, side) in sides:
            raise AdapterError(
                f"{WEIGHTS}: tensors {name_of(sides[module, side])} and {name_of(key)} are both lora_{side} "
                f"of {module}: remove one, or {_AGAIN}"
            )
        sides[module, side] = key
    if not sides:
        raise AdapterError(f"{WEIGHTS} holds no LoRA tensors: {_AGAIN}")
    for module, side in sides:
        other = "B" if side == "A" else "A"
        if (module, other) not in sides:
            raise AdapterError(f"{WEIGHTS}: {module} has lora_{side} but no lora_{other}: {_AGAIN}")
    return {module: (sides[module, "A"], sides[module, "B"]) for module in modules if (module, "A") in sides}


def _why_foreign(key: str, module: str | None, config: LlamaConfig) -> str:
    """Why a tensor is none of ours."""
    if any(name in key for name in _EMBEDDINGS):
        return (
            f"tensor {name_of(key)} adapts the embedding or the output head, which is not supported: train with "
            "target_modules on the layers' projections only"
        )
    if "lora_magnitude_vector" in key:
        return (
            f"tensor {name_of(key)} belongs to DoRA, which is not supported: merge the adapter into its base, or train "
            "with use_dora=False"
        )
    if ".lora_" in key and key.endswith(".bias"):
        return f"tensor {name_of(key)} is a LoRA bias, which is not supported: train with lora_bias=False"
    layer = re.match(r"model\.layers\.(\d+)\.", module or "")
    if layer and int(layer[1]) >= config.num_hidden_layers:
        return (
            f"tensor {name_of(key)} is for layer {layer[1]}, but the base has {config.num_hidden_layers}: {_OTHER_BASE}"
        )
    return f"tensor {name_of(key)} is not LoRA A or B of a Llama projection: remove it, or {_AGAIN}"


def _check_shapes(
    file: AdapterFile, module: str, names: tuple[str, str], config: LlamaConfig, settings: AdapterConfig, max_rank: int
) -> int:
    """The module's rank, once its shapes fit the base, its config and the limit."""
    outputs, inputs = config.module_shape(module)
    shape_a, shape_b = file.shapes[names[0]], file.shapes[names[1]]
    if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1]:
        raise AdapterError(
            f"{WEIGHTS}: {module} has A {list(shape_a)} and B {list(shape_b)}, expected [r, {inputs}] and "
            f"[{outputs}, r]: {_AGAIN}"
        )
    if shape_a[1] != inputs or shape_b[0] != outputs:
        raise AdapterError(
            f"{WEIGHTS}: {module} maps {shape_a[1]} to {shape_b[0]} features, the base maps {inputs} to {outputs}: "
            f"{_OTHER_BASE}"
        )
    for name in names:
        file.check_floating(name)
    rank, stated = shape_a[0], settings.rank_of(module)
    if rank != stated:
        raise AdapterError(
            f"{WEIGHTS}: {module} has rank {rank}, adapter_config.json says {stated} (r or rank_pattern): the files "
            f"do not belong together; {_AGAIN}"
        )
    if rank > max_rank:
        raise AdapterError(
            f"{module} has rank {rank}, above the limit of {max_rank}: start with --max-lora-rank {rank} or more"
        )
    return rank


def _content_hash(file: AdapterFile, pairs: Mapping[str, tuple[str, str]], scaling: Mapping[str, float]) -> str:
    """One digest a module, made on some threads, and the digest of those."""

    def digest(module: str) -> bytes:
        digest = hashlib.sha256(f"{module} {scaling[module]!r}\n".encode())
        for name in pairs[module]:
            digest.update(f"{FLOATING[file.dtypes[name]]} {list(file.shapes[name])}\n".encode())
            digest.update(file.data(name).data)
        return digest.digest()

    modules = list(pairs)
    parts = [modules[first : first + MODULES_AT_ONCE] for first in range(0, len(modules), MODULES_AT_ONCE)]
    digests = chain.from_iterable(readers().map(lambda part: [digest(module) for module in part], parts))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _differences(settings: AdapterConfig, config: LlamaConfig, present: set[str]) -> tuple[str, ...]:
    """Where adapter_config.json's choice of modules disagrees with the tensors."""
    try:
        chosen = {module for module in config.linear_modules() if settings.targets_module(module)}
    except LookAroundError as problem:
        return (f"the modules that adapter_config.json targets are not compared with the tensors: {problem}",)
    found = []
    without = (chosen - present, "targeted by adapter_config.json have no tensors (served without LoRA)")
    beyond = (present - chosen, "have tensors and are not targeted by adapter_config.json (served with LoRA)")
    for surplus, text in (without, beyond):
        if surplus:
            ordered = [module for module in config.linear_modules() if module in surplus]
            found.append(
                f"{len(ordered)} modules {text}: {', '.join(ordered[:3])}{', ...' if len(ordered) > 3 else ''}"
            )
    return tuple(found)
