"""Runs a plain Llama step by step over a paged cache, as the engine would, on the CPU.

runner = PagedRunner(model, sequences=2)
logits = runner.step([Chunk(0, [1, 2, 3], adapter=1), Chunk(1, [9], adapter=-1)])    # one [tokens, V] per chunk
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.checkpoint import Checkpoint, checkpoint_config, load_weights
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora_stacks import fill_slot, lora_shape_for, resolved, slot_tensors
from sidestream.ops.core.kv_layout import PAGE_SIZE, kv_cache_shape

from .tiny import TinyBase


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence, with the adapter slot they use (-1: none)."""

    sequence: int
    tokens: Sequence[int]
    adapter: int = -1


def plain_model(
    base: TinyBase, adapter_paths: Sequence[Any] = (), dtype: torch.dtype = torch.float32, slots: int | None = None
) -> tuple[Llama, list[Adapter]]:
    """Our plain Llama with the base's weights and adapter i in slot i."""
    config = checkpoint_config(base.path)
    adapters = [load_adapter(path, config, max_rank=256, base=base.path) for path in adapter_paths]
    lora = lora_shape_for(adapters, slots or max(len(adapters), 1))
    model = Llama(config, lora, dtype)
    checkpoint = Checkpoint(base.path, config)
    checkpoint.validate(model.checkpoint_tensors(), tied=config.tie_word_embeddings)
    load_weights(model, checkpoint)
    for slot, adapter in enumerate(adapters):
        assert lora is not None
        fill_slot(model, slot, slot_tensors(resolved(adapter, checkpoint.tensor), config, lora, dtype))
    return model, adapters


class PagedRunner:
    """Keeps the caches and lengths of `sequences` sequences of at most `blocks` pages each; pages are dealt in random
    order.

    `fill` is what the caches hold at first: NaN for the reference ops; kernels want finite memory.
    """

    def __init__(
        self, model: Llama, sequences: int, blocks: int = 4, padding: int = 0, fill: float = float("nan")
    ) -> None:
        self.model, self.padding = model, padding
        config = model.config
        pages = sequences * blocks + 1  # page 0 belongs to nobody
        self.block_table = torch.randperm(pages - 1).view(sequences, blocks).to(torch.int32) + 1
        shape = kv_cache_shape(pages, config.num_key_value_heads, config.head_dim)
        self.kv_caches = [torch.full(shape, fill, dtype=model.dtype) for _ in range(config.num_hidden_layers)]
        self.lengths = [0] * sequences

    def inputs(self, chunks: Sequence[Chunk], all_logits: bool = True) -> dict[str, Any]:
        """The keyword arguments of one step, `padding` padding tokens at the end; also advances the lengths."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        adapters: list[int] = []
        starts, contexts = [0], []
        for chunk in chunks:
            first = self.lengths[chunk.sequence]
            for position, token in enumerate(chunk.tokens, start=first):
                page = int(self.block_table[chunk.sequence, position // PAGE_SIZE])
                tokens.append(token)
                positions.append(position)
                slots.append(page * PAGE_SIZE + position % PAGE_SIZE)
                adapters.append(chunk.adapter)
            self.lengths[chunk.sequence] = first + len(chunk.tokens)
            starts.append(len(tokens))
            contexts.append(self.lengths[chunk.sequence])
        rows = list(range(len(tokens))) if all_logits else [start - 1 for start in starts[1:]]
        pad = [0] * self.padding
        return {
            "input_ids": torch.tensor(tokens + pad),
            "positions": torch.tensor(positions + pad),
            "slot_mapping": torch.tensor(slots + [-1] * self.padding, dtype=torch.int32),
            "adapter_index": torch.tensor(adapters + [-1] * self.padding, dtype=torch.int32),
            "block_table": self.block_table[[chunk.sequence for chunk in chunks]],
            "context_lens": torch.tensor(contexts, dtype=torch.int32),
            "query_start": torch.tensor(starts, dtype=torch.int32),
            "logits_indices": torch.tensor(rows, dtype=torch.int32),
            "kv_caches": self.kv_caches,
        }

    @torch.no_grad()
    def step(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Runs one step; fp32 logits [tokens, V] for each chunk."""
        logits = self.model(**self.inputs(chunks)).float()
        return list(logits.split([len(chunk.tokens) for chunk in chunks]))
