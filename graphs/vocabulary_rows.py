"""Changed rows of the embedding and the output head as low-rank updates.

A row that an adapter replaces is the base's row plus a difference. n such rows are LoRA of rank n: one matrix has the
differences, the other a single one for each row. Slots and programs then treat them as LoRA on these modules.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from .adapter_config import MAX_TRAINED_TOKENS, AdapterError
from .adapter_vocabulary import VocabularyTensors
from .checkpoint import EMBEDDING, HEAD, Checkpoint, CheckpointError
from .config import LlamaConfig
from .families import VOCABULARY_MODULES
from .files.adapter_file import PIECE, AdapterFile
from .files.safetensors_file import LARGEST
from .files.untrusted_files import name_of

_MERGE = "merge the adapter into its base (merge_and_unload) and serve that, or train these tokens only"


@dataclass(frozen=True)
class ChangedRows:
    """Rows of the embedding or of the head: ids [n] int64, ascending; new values and differences [n, H] fp32."""

    ids: torch.Tensor
    values: torch.Tensor
    differences: torch.Tensor

    @property
    def digest(self) -> bytes:
        """A sha256 of ids and values."""
        return hashlib.sha256(self.ids.numpy().tobytes() + self.values.numpy().tobytes()).digest()

    def update(self, module: str, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of LoRA with scaling 1, as PEFT shapes them for `module`."""
        ones = torch.zeros(len(self.ids), vocabulary)
        ones[torch.arange(len(self.ids)), self.ids] = 1.0
        if module == VOCABULARY_MODULES[0]:
            return ones, self.differences.T.contiguous()
        return self.differences, ones.T.contiguous()


def changed_rows(
    file: AdapterFile, found: VocabularyTensors, config: LlamaConfig, base: Path | None, max_rows: int
) -> dict[str, ChangedRows]:
    """Return module -> the rows in which the adapter's embedding and head differ from the base's.

    `file`: read, without the whole matrices, which are compared in pieces. `base`: the base's checkpoint. Raises
    AdapterError for more than `max_rows` rows of a module, values out of range, and a base without a checkpoint.
    """
    if not len(found):
        return {}
    if base is None:
        raise AdapterError(
            "it has a copy of the embedding or the output head, or trained tokens, and the base has random weights "
            "(load_format='dummy'), which these cannot belong to: serve the base's checkpoint"
        )
    try:
        checkpoint = Checkpoint(base, config)
        weights = {
            module: checkpoint.tensor(EMBEDDING if config.tie_word_embeddings else name)
            for module, name in zip(VOCABULARY_MODULES, (EMBEDDING, HEAD), strict=True)
        }
    except CheckpointError as problem:
        raise AdapterError(f"the base's embedding cannot be compared with the adapter's: {problem}") from None
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for name, module in found.copies.items():
        differing = _differing(file, name, module, weights[module], max_rows)
        if differing:
            rows[module] = _joined(rows.get(module, {}), differing, module)
    embedding, head = VOCABULARY_MODULES
    if config.tie_word_embeddings and embedding in rows and head not in found.copies.values() and not found.replaced:
        rows[head] = dict(rows[embedding])
    for module in VOCABULARY_MODULES:
        source = embedding if module == head and config.tie_word_embeddings and head not in found.tokens else module
        if source in found.tokens:
            tokens = found.tokens[source]
            values = file.tensor(tokens.tensor)
            rows.setdefault(module, {}).update(zip(tokens.ids, values, strict=True))
    return {module: _changed(module, changed, weights[module], max_rows) for module, changed in rows.items()}


def remedy(rank: int) -> str:
    """Return how to serve an adapter of a rank above the engine's."""
    return f"start with max_lora_rank={rank}" if rank <= MAX_TRAINED_TOKENS else _MERGE


def _differing(
    file: AdapterFile, name: str, module: str, weight: torch.Tensor, max_rows: int
) -> dict[int, torch.Tensor]:
    """Return id -> row for the rows of a whole matrix that differ from the base's. Raises AdapterError for many."""
    count, width = file.shape(name)
    step = max(1, PIECE // (4 * width))
    rows: dict[int, torch.Tensor] = {}
    total = 0
    for first in range(0, count, step):
        end = min(first + step, count)
        piece = file.rows(name, first, end)
        # the trainer may have loaded the base in the adapter's dtype
        different = (piece != weight[first:end].to(piece.dtype)).any(1).nonzero().flatten().tolist()
        total += len(different)
        if total <= max_rows:
            rows.update((first + row, piece[row].clone()) for row in different)
    if total > max_rows:
        raise AdapterError(
            f"tensor {name_of(name)} differs from {module} of the base in {total} of {count} rows, each of which needs "
            f"a rank, above the limit of {max_rows}: {remedy(total)}"
        )
    return rows


def _joined(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor], module: str) -> dict[int, torch.Tensor]:
    """Return the rows of two copies of one matrix, which must agree. Raises AdapterError."""
    if one and (one.keys() != other.keys() or not all(torch.equal(one[row], other[row]) for row in one)):
        raise AdapterError(
            f"two copies of {module} differ from the base in different ways, and nothing shows which one was trained: "
            "save the adapter again with save_pretrained(DIRECTORY, save_embedding_layers=False)"
        )
    return other


def _changed(module: str, rows: dict[int, torch.Tensor], weight: torch.Tensor, max_rows: int) -> ChangedRows:
    """Return the rows in ascending order. Raises AdapterError for too many, and for values out of range."""
    if len(rows) > max_rows:
        raise AdapterError(
            f"{module} has {len(rows)} trained tokens, each of which needs a rank, above the limit of {max_rows}: "
            f"{remedy(len(rows))}"
        )
    ids = torch.tensor(sorted(rows))
    values = torch.stack([rows[token].float() for token in ids.tolist()])
    if not bool((values.abs() < LARGEST).all()):
        raise AdapterError(
            f"trained rows of {module} have NaN, infinity or magnitudes of {LARGEST} or more: training diverged; use "
            "an earlier checkpoint of the adapter"
        )
    return ChangedRows(ids, values, values - weight[ids].float())
