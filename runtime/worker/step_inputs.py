"""Static input tensors of a bucket, filled and padded for each step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...compiler.program.program import Program
from ...ops.core.kv_layout import PAGE_SIZE
from ..scheduler.step_plan import StepPlan
from .staging import Staging

NAMES = (
    "input_ids",
    "positions",
    "slot_mapping",
    "adapter_index",
    "block_table",
    "context_lens",
    "query_start",
    "logits_indices",
)
PADDING = {
    "input_ids": 0,
    "positions": 0,
    "slot_mapping": -1,
    "adapter_index": -1,
    "block_table": 0,
    "context_lens": 0,
    "logits_indices": 0,
}
NO_ARRAYS: Mapping[str, Any] = {}


class ExtraInput(NamedTuple):
    """An array of a step that no program reads: one number per sequence, or `per_row` of logits."""

    name: str
    dtype: torch.dtype
    padding: int
    per_row: bool = False


class StepInputs:
    """The tensors that a program's inputs are bound to, refilled for each step by `fill`.

    tensors  the program's inputs by name, only those that it uses
    extra    arrays for speculation, copied with them; query_start is then always among them
    staged   all arrays by name, on the device

    Padding tokens have slot -1 (nothing is stored), adapter -1 and position 0. Padding sequences have context length 0
    and no query tokens: query_start repeats the number of real tokens.
    """

    def __init__(self, program: Program, device: torch.device, extra: Sequence[ExtraInput] = ()) -> None:
        buffers = [buffer for buffer in program.of_kind("input") if buffer.name in NAMES]
        bucket = program.bucket
        if bucket is None:
            raise ValueError("the program has no bucket")
        names = [buffer.name for buffer in buffers]
        fields = [(buffer.name, buffer.shape, buffer.dtype) for buffer in buffers]
        fields += [(name, (bucket.sequences,), torch.int64) for name in ("feed_positions", "feed_rows")]
        rows = bucket.tokens if bucket.verifies else bucket.sequences
        fields += [(name, (rows if per_row else bucket.sequences,), dtype) for name, dtype, _, per_row in extra]
        self._names = list(names)
        if extra and "query_start" not in names:
            self._names.append("query_start")
            fields.append(("query_start", (bucket.sequences + 1,), torch.int32))
        self._extra, self._bucket = extra, bucket
        self._staging = Staging(fields, device)
        self.staged: Mapping[str, torch.Tensor] = self._staging.device
        self.tensors = {name: self.staged[name] for name in names}
        self.clear()

    def clear(self) -> None:
        """Fill in padding only: such a step stores nothing."""
        self._fill({})

    def fill_random(self, vocabulary: int) -> None:
        """Fill in random tokens, the same at each call, of short sequences that share the cache's last page."""
        bucket = self._bucket
        rows, each = np.arange(bucket.tokens), bucket.tokens // bucket.sequences
        self._fill(
            {
                "input_ids": np.random.default_rng(0).integers(vocabulary, size=bucket.tokens),
                "positions": rows % each,
                "slot_mapping": (bucket.pages - 1) * PAGE_SIZE + rows % PAGE_SIZE,
                "block_table": bucket.pages - 1,
                "context_lens": each,
                "query_start": np.arange(bucket.sequences + 1) * each,
            }
        )

    def _fill(self, values: Mapping[str, Any]) -> None:
        host = self._staging.host
        for name in self._names:
            host[name][:] = values.get(name, PADDING.get(name, 0))
        for name, _, padding, _ in self._extra:
            host[name].fill(padding)
        self._staging.upload()

    def fill(self, plan: StepPlan, last_tokens: torch.Tensor, extra: Mapping[str, Any] = NO_ARRAYS) -> None:
        """Copy a step to the device.

        last_tokens  int32, one per row of the previous step: tokens that only the device has
        extra        values of the extra inputs; those that the step does not need may be missing
        """
        host = self._staging.host
        for name, _, padding, _ in self._extra:
            if name in extra:
                count = len(extra[name])
                host[name][:count] = extra[name]
                host[name][count:] = padding
        for name in self._names:
            values, target = getattr(plan, name), host[name]
            if name == "block_table":
                target[: values.shape[0], : values.shape[1]] = values
                continue  # the rest belongs to no context
            count = len(values)
            target[:count] = values
            target[count:] = plan.num_tokens if name == "query_start" else PADDING[name]
        count = len(plan.feed_positions)
        same_order = count == plan.num_tokens and _is_range(plan.feed_positions) and _is_range(plan.feed_rows)
        if count and not same_order:
            host["feed_positions"][:count] = plan.feed_positions
            host["feed_rows"][:count] = plan.feed_rows
        self._staging.upload()
        if not count:
            return
        input_ids = self.tensors["input_ids"]
        if same_order:  # the usual step: the last step's sequences continue in the same rows
            input_ids[:count].copy_(last_tokens[:count])
            return
        positions, rows = self._staging.device["feed_positions"][:count], self._staging.device["feed_rows"][:count]
        input_ids.index_copy_(0, positions, last_tokens.index_select(0, rows).to(input_ids.dtype))


def _is_range(values: Iterable[int]) -> bool:
    array = np.asarray(values)
    return bool((array == np.arange(len(array))).all())
