"""Programs of a head: the first pass over a step's rows, and one row of the chain.

Both return tokens of the target's vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ..llama import StepDims, StepInputs
from .eagle import EagleDraft


class _Step(EagleDraft):
    """A head with the argument names of programs."""

    def rows(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        *step: torch.Tensor,
    ) -> torch.Tensor:
        """Run the layer over hidden_states [T, H]. `step` has the fields of `StepInputs` after the angles of RoPE."""
        inputs = StepInputs(*self.rotary_emb(positions), *step)
        return self.midlayer(self.embed_tokens(input_ids), hidden_states, inputs, kv_caches[0])

    def fused(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Apply `fc` to the concatenation of three hidden states [T, H], computed as a sum of three products.

        Their magnitudes differ so much that one quantization scale per row would fit only the last one. So each is
        multiplied by a slice of the weight: the compiler does not quantize linears with a slice as weight.
        """
        width, weight = self.config.hidden_size, self.fc.weight
        parts = [F.linear(each, weight[:, place * width : (place + 1) * width]) for place, each in enumerate(features)]
        return parts[0] + parts[1] + parts[2]

    def drafted(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the most likely tokens [B] int64 for hidden states [B, H]."""
        best = F.linear(self.norm(hidden_states), self.lm_head.weight).argmax(-1)
        return best + self.d2t.index_select(0, best)

    def _inputs(self, tokens: int, sequences: int, pages: int, blocks: int) -> dict[str, Any]:
        found = EagleDraft.example_inputs(self, tokens, sequences, pages, blocks)
        found["kv_caches"] = [found.pop("kv_cache")]
        return found


class FirstPass(_Step):
    """Run over all rows of a step that the target has computed."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        features: list[torch.Tensor],
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapter_index: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start: torch.Tensor,
        chosen_rows: torch.Tensor,
        kv_caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (drafted tokens [B] int64, hidden states [B, H]) of the rows `chosen_rows`, from a step's T rows.

        input_ids [T]: the token after each row's position. features: the target's three hidden states [T, H].
        chosen_rows [B] int32: each sequence's row of the last accepted token. The rest is as in `Llama.forward`.
        """
        step = slot_mapping, adapter_index, block_table, context_lens, query_start
        rows = self.rows(input_ids, self.fused(features), positions, kv_caches, *step)
        hidden_states = rows.index_select(0, chosen_rows)
        return self.drafted(hidden_states), hidden_states

    def example_inputs(  # type: ignore[override]
        self, tokens: int = 24, sequences: int = 6, pages: int = 16, blocks: int = 4
    ) -> dict[str, Any]:
        """See `Llama.example_inputs`."""
        found = self._inputs(tokens, sequences, pages, blocks)
        found["features"] = [part.contiguous() for part in found.pop("features_or_hidden").chunk(3, dim=-1)]
        found["chosen_rows"] = found.pop("logits_indices")
        return found

    def dynamic_shapes(self) -> dict[str, Any]:
        """See `Llama.dynamic_shapes`."""
        dims = StepDims.create()
        rows = {"features": [{0: dims.tokens}] * 3, "chosen_rows": {0: dims.sequences}}
        return {**dims.shapes(), "kv_caches": [{0: dims.pages}], **rows}


class ChainStep(_Step):
    """Run one row of each sequence, after the head's previous row."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapter_index: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start: torch.Tensor,
        kv_caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (drafted tokens [B] int64, hidden states [B, H]) of the next row of each sequence.

        input_ids [B]: the last drafted tokens. hidden_states [B, H]: results of the row that drafted them. The rest is
        as in `Llama.forward` for a decode step.
        """
        step = slot_mapping, adapter_index, block_table, context_lens, query_start
        hidden_states = self.rows(input_ids, hidden_states, positions, kv_caches, *step)
        return self.drafted(hidden_states), hidden_states

    def example_inputs(  # type: ignore[override]
        self, tokens: int = 24, sequences: int = 6, pages: int = 16, blocks: int = 4
    ) -> dict[str, Any]:
        """See `Llama.example_inputs`."""
        found = self._inputs(tokens, sequences, pages, blocks)
        found["hidden_states"] = found.pop("features_or_hidden")[:, : self.config.hidden_size].contiguous()
        del found["logits_indices"]
        return found

    def dynamic_shapes(self) -> dict[str, Any]:
        """See `Llama.dynamic_shapes`."""
        dims = StepDims.create()
        return {**dims.shapes(), "kv_caches": [{0: dims.pages}], "hidden_states": {0: dims.tokens}}
