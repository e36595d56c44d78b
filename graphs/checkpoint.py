"""A model's weights in safetensors form, one file or shards with an index; validated before loading, read lazily."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import nn

from .config import LlamaConfig
from .config_fields import read_json_object
from .files.safetensors_file import SafetensorsFile
from .head_layout import arranged, arranged_shape
from .moe.expert_parts import ExpertStack, graph_tensors
from .quantization_config import FILE_DTYPES

_log = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_AGAIN = "download or copy it again"
_OWN_CONFIG = "use the config.json of these weights"
_MAX_INDEX_BYTES = 64 << 20
_BYTES = {"F32": 4, "I8": 1, "F8_E4M3": 1}
_PIECE_ROWS = 4096
"""Rows of head and embedding that are compared at a time: different ones differ early, so few rows are read."""
_HARMLESS = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")  # in old Llama checkpoints; computed from the config instead


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file, the tensor and the remedy."""


class Checkpoint:
    """The tensors of a checkpoint directory, by name.

    The constructor reads headers only, so missing and truncated files are reported before any weight is read. `tensor`
    reads through a memory map. With a `config`, a packed tensor is split into its projections, experts are put together
    (`expert_parts`), and heads have the graph's layout (`head_layout`).
    """

    def __init__(self, directory: str | Path, config: LlamaConfig | None = None) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory} is not a directory: point at a Hugging Face checkpoint with config.json and "
                "safetensors files"
            )
        index = self.directory / INDEX
        if (self.directory / SINGLE).exists():
            self._files = [SafetensorsFile(self.directory / SINGLE, CheckpointError, _AGAIN)]
        elif index.exists():
            self._files = self._open_shards(index)
        else:
            raise CheckpointError(self._no_weights())
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.shapes:
                if name in self._file_of:
                    raise CheckpointError(
                        f"tensor {name!r} is in {self._file_of[name].path.name} and in {file.path.name}: remove one; "
                        f"{_AGAIN}"
                    )
                self._file_of[name] = file
        self._format = "" if config is None else config.weight_format
        self._parts: dict[str, tuple[str, int, int]] = {}
        self._stacks: dict[str, ExpertStack] = {}
        self._arrange = config if config is not None and config.rearranges_heads else None
        if config is not None and config.packed_checkpoint:
            self._split_packed(config)
        if config is not None and config.num_experts:
            self._find_experts(config)
        if (
            config is not None
            and config.tie_word_embeddings
            and HEAD in self._file_of
            and EMBEDDING not in self._file_of
        ):
            self._file_of[EMBEDDING] = self._file_of.pop(HEAD)
            self._parts[EMBEDDING] = (HEAD, 0, (*self._file_of[EMBEDDING].shapes[HEAD], 0)[0])

    def _split_packed(self, config: LlamaConfig) -> None:
        """Replace the entries of packed tensors by entries of their projections."""
        for module, kind in product(config.stored_modules(), ("weight", "weight_scale")):
            parts, name = config.parts_of(module), f"{module}.{kind}"
            if len(parts) == 1 or name not in self._file_of:
                continue
            file = self._file_of.pop(name)
            rows, wanted = file.shapes[name][:1], parts[-1][2]
            if rows != (wanted,):
                shapes = f"has shape {list(file.shapes[name])}, config.json implies {wanted} rows"
                raise CheckpointError(f"{file.path.name}: tensor {name!r} {shapes}: {_OWN_CONFIG}")
            for part, row, end in parts:
                self._file_of[f"{part}.{kind}"] = file
                self._parts[f"{part}.{kind}"] = (name, row, end)

    def _find_experts(self, config: LlamaConfig) -> None:
        """Replace the entries of experts and routers by those of the graph's weights."""
        found = graph_tensors(config, self._file_of, self._where())
        self._file_of = {}
        for name, tensor in found.items():
            if isinstance(tensor, ExpertStack):
                self._stacks[name] = tensor
                self._file_of[name], _ = tensor.experts[0][0]
                continue
            self._file_of[name], stored = tensor
            if stored != name:
                self._parts[name] = (stored, 0, (*self._file_of[name].shapes[stored], 0)[0])

    def _open_shards(self, index: Path) -> list[SafetensorsFile]:
        """Open the shards of the index, in name order, and check that each contains its tensors."""
        weight_map = read_json_object(index, CheckpointError, _AGAIN, _MAX_INDEX_BYTES).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(shard, str) for shard in weight_map.values())
        ):
            raise CheckpointError(f"{INDEX} has no weight_map from tensor to file: {_AGAIN}")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    f"{INDEX} names {shard!r}, which is not a .safetensors file in this directory: {_AGAIN}"
                )
        missing = [shard for shard in shards if not (self.directory / shard).exists()]
        if missing:
            lost = next(name for name, shard in weight_map.items() if shard == missing[0])
            raise CheckpointError(
                f"{len(missing)} of {len(shards)} shards missing, first {missing[0]} (with tensor {lost!r}): "
                f"{_AGAIN} into {self.directory}"
            )
        files = {shard: SafetensorsFile(self.directory / shard, CheckpointError, _AGAIN) for shard in shards}
        for name, shard in weight_map.items():
            if name not in files[shard].shapes:
                raise CheckpointError(
                    f"{shard} has no tensor {name!r}, but {INDEX} lists it there: the shards are of different "
                    f"downloads; {_AGAIN}"
                )
        return list(files.values())

    def _no_weights(self) -> str:
        """Return the error for a directory without safetensors files."""
        pickles = sorted(path.name for path in self.directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickles:
            return (
                f"{pickles[0]} is a pickle, which can run code and is never loaded: save the model again with "
                "safe_serialization=True"
            )
        shards = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if shards:
            return f"{self.directory} has {shards[0]}, but neither {SINGLE} nor {INDEX}: download or copy the index too"
        return f"{self.directory} has neither {SINGLE} nor {INDEX}: point at a Hugging Face checkpoint"

    def names(self) -> list[str]:
        """Return every tensor's name, in shard order."""
        return list(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, from the header."""
        file = self._file(name)
        if name in self._stacks:
            return self._stacks[name].shape
        if name not in self._parts:
            shape = file.shapes[name]
        else:
            packed, row, end = self._parts[name]
            shape = (end - row, *file.shapes[packed][1:])
        module, _, kind = name.rpartition(".")
        return shape if self._arrange is None else arranged_shape(self._arrange, module, kind, shape)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor as stored (bf16, fp16, fp32 or eight bits): a view of the memory map, unless heads are
        rearranged or experts put together.
        """
        stored = self.stored(name)
        return stored.to() if isinstance(stored, ExpertStack) else stored

    def stored(self, name: str) -> torch.Tensor | ExpertStack:
        """Return the same, but leave the experts of a weight where they are stored."""
        file = self._file(name)
        if name in self._stacks:
            return self._stacks[name]
        if name not in self._parts:
            tensor = file.tensor(name)
        else:
            packed, row, end = self._parts[name]
            tensor = file.tensor(packed)[row:end]
        module, _, kind = name.rpartition(".")
        return tensor if self._arrange is None else arranged(self._arrange, module, kind, tensor)

    def parts(self, name: str) -> Iterator[tuple[tuple[int | slice, ...], torch.Tensor]]:
        """Yield (place in the tensor, values) for each stored part; a tensor that is stored whole is one part."""
        stored = self.stored(name)
        yield from stored.parts() if isinstance(stored, ExpertStack) else [((), stored)]

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Return the bytes of the named tensors (None: all) in the files."""
        total = 0
        for name in self._file_of if names is None else names:
            count = 1
            for extent in self.shape(name):
                count *= extent
            total += count * _BYTES.get(self._file(name).dtypes[self._stored(name)], 2)
        return total

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the named tensors (None: all) in file order, so that each file is read once."""
        wanted = None if names is None else set(names)
        for name in self._file_of:
            if wanted is None or name in wanted:
                yield name, self.tensor(name)

    def has_own_head(self) -> bool:
        """Return whether the files contain an output head that differs from the embedding."""
        if HEAD not in self or EMBEDDING not in self:
            return False
        head, embedding = self.tensor(HEAD), self.tensor(EMBEDDING)
        if head.shape != embedding.shape:
            return True
        dtype = torch.promote_types(head.dtype, embedding.dtype)
        pieces = zip(head.split(_PIECE_ROWS), embedding.split(_PIECE_ROWS), strict=True)
        return not all(torch.equal(ours.to(dtype), theirs.to(dtype)) for ours, theirs in pieces)

    def validate(self, expected: Mapping[str, tuple[int, ...]], tied: bool = False) -> None:
        """Compare names, shapes and dtypes with `expected` (`Llama.checkpoint_tensors()`). Raises CheckpointError.

        `tied`: the output head is the embedding, and a stored copy of it is allowed.
        """
        for name, shape in expected.items():
            if name not in self._file_of:
                hint = f"it does not belong to this config.json; {_AGAIN}"
                if name == HEAD:
                    hint = "set tie_word_embeddings in config.json if the model uses its embedding as output head"
                elif (bare := name.removeprefix("model.")) in self._file_of:
                    hint = f"they have {bare!r}, so AutoModel saved them; save the model of AutoModelForCausalLM"
                raise CheckpointError(f"tensor {name!r} is missing from {self._where()}: {hint}")
            file = self._file_of[name]
            if self.shape(name) != tuple(shape):
                shapes = f"has shape {list(self.shape(name))}, config.json implies {list(shape)}"
                raise CheckpointError(f"{file.path.name}: tensor {name!r} {shapes}: {_OWN_CONFIG}")
            found = file.dtypes[self._stored(name)]
            if f"{name}_scale" not in expected:
                file.check_floating(self._stored(name))
            elif found != FILE_DTYPES[self._format]:
                dtypes = f"has dtype {found}, quantization_config implies {FILE_DTYPES[self._format]}"
                raise CheckpointError(f"{file.path.name}: tensor {name!r} {dtypes}: {_OWN_CONFIG}")
        for name in self._file_of:
            if name in expected or _HARMLESS.fullmatch(name):
                continue
            if tied and name == HEAD:
                if not self.has_own_head():
                    continue
                raise CheckpointError(
                    f"{self._file_of[name].path.name}: tensor {name!r} differs from the embedding, but the two were "
                    "equal when the server started: restart it"
                )
            raise CheckpointError(
                f"{self._file_of[name].path.name}: unexpected tensor {self._stored(name)!r}: this is not a plain "
                "checkpoint of its family; use one without it"
            )

    def _stored(self, name: str) -> str:
        """Return the name of the tensor in the file that contains `name`, or its first part."""
        if name in self._stacks:
            return self._stacks[name].experts[0][0][1]
        return self._parts[name][0] if name in self._parts else name

    def _where(self) -> str:
        return self._files[0].path.name if len(self._files) == 1 else f"all {len(self._files)} shards"

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name!r} is not in {self._where()}: {_AGAIN}")
        return self._file_of[name]


def checkpoint_config(directory: Path) -> LlamaConfig:
    """Return the config of a model directory.

    If the config is tied but the files have a different output head, the model is served with that head, as in
    transformers 5 (logged once). Raises ConfigError; unreadable weights are reported when they are loaded.
    """
    config = LlamaConfig.from_directory(directory)
    if not config.tie_word_embeddings:
        return config
    try:
        untied = Checkpoint(directory).has_own_head()
    except CheckpointError:
        return config
    if untied:
        _report_own_head(directory)
    return replace(config, tie_word_embeddings=not untied)


@cache
def _report_own_head(directory: Path) -> None:
    _log.warning(
        "%s: config.json sets tie_word_embeddings, but %s differs from %s: the model is served with its own head; set "
        "tie_word_embeddings to false there",
        directory,
        HEAD,
        EMBEDDING,
    )


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a validated checkpoint into a plain model's parameters (for eager runs)."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in filter(parameters.__contains__, checkpoint.names()):
            for place, part in checkpoint.parts(name):
                parameters[name][place].copy_(part)
