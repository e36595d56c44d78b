"""The inputs of a plain Llama for a batch of texts."""

from collections.abc import Sequence
from typing import Any

import torch

from ...ops.core.kv_layout import PAGE_SIZE


def batch_inputs(batch: Sequence[tuple[Sequence[int], int]]) -> dict[str, Any]:
    """The inputs of one prefill of (token ids, adapter slot) each, but for the KV caches; logits of every token.

    Page 0 belongs to nobody.
    """
    lengths = [len(ids) for ids, _ in batch]
    blocks = max(-(-length // PAGE_SIZE) for length in lengths)

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    first = [(1 + row * blocks) * PAGE_SIZE for row in range(len(batch))]  # a sequence's pages lie one after the other
    return {
        "input_ids": torch.tensor([token for ids, _ in batch for token in ids]),
        "positions": torch.tensor([position for length in lengths for position in range(length)]),
        "slot_mapping": integers(
            [start + position for start, length in zip(first, lengths, strict=True) for position in range(length)]
        ),
        "adapter_index": integers([slot for ids, slot in batch for _ in ids]),
        "block_table": torch.arange(1, 1 + len(batch) * blocks, dtype=torch.int32).view(len(batch), blocks),
        "context_lens": integers(lengths),
        "query_start": integers([sum(lengths[:row]) for row in range(len(batch) + 1)]),
        "logits_indices": torch.arange(sum(lengths), dtype=torch.int32),
    }
