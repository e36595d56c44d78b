"""A bucket's static input tensors, and how a step is padded to fill them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ....compiler.program.program import Program
from ...scheduler.step_plan import StepPlan
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
NOTHING: Mapping[str, Any] = {}


class Beyond(NamedTuple):
    """An array of a step that no program reads: a number for each sequence, or for each row of logits that a step of
    drafts or of decoding has, and what it holds for padding.
    """

    name: str
    dtype: torch.dtype
    padding: int
    of_rows: bool = False


class StepInputs:
    """Tensors that a program's inputs are bound to (`tensors`), refilled for each step by `fill`.

    `more`: arrays that cross with them for what else runs of a step that follows its sequences, which also has
    query_start then, whether the program takes it or not. `staged` has all of them by name.

    Padding tokens have slot -1 (nothing is stored), adapter -1 and position 0; padding sequences have context length 0
    and no query tokens: query_start stays at the number of real tokens. A program has only those inputs that it uses.
    """

    def __init__(self, program: Program, device: torch.device, more: Sequence[Beyond] = ()) -> None:
        buffers = [buffer for buffer in program.of_kind("input") if buffer.name in NAMES]
        bucket = program.bucket
        if bucket is None:
            raise ValueError("the engine's programs are made for buckets, this one is not")
        names = [buffer.name for buffer in buffers]
        fields = [(buffer.name, buffer.shape, buffer.dtype) for buffer in buffers]
        fields += [(name, (bucket.sequences,), torch.int64) for name in ("feed_positions", "feed_rows")]
        rows = bucket.tokens if bucket.verifies else bucket.sequences
        fields += [(name, (rows if of_rows else bucket.sequences,), dtype) for name, dtype, _, of_rows in more]
        self._names = list(names)
        if more and "query_start" not in names:
            self._names.append("query_start")
            fields.append(("query_start", (bucket.sequences + 1,), torch.int32))
        self._more = more
        self._staging = Staging(fields, device)
        self.staged: Mapping[str, torch.Tensor] = self._staging.device
        self.tensors = {name: self.staged[name] for name in names}
        self.clear()

    def clear(self) -> None:
        """A step of padding only: nothing is stored by it."""
        for name in self._names:
            self._staging.host[name].fill(PADDING.get(name, 0))
        for name, _, padding, _ in self._more:
            self._staging.host[name].fill(padding)
        self._staging.upload()

    def fill(self, plan: StepPlan, last_tokens: torch.Tensor, more: Mapping[str, Any] = NOTHING) -> None:
        """Copy a step in.

        `last_tokens` (int32, one a row of the step before) supplies what only the device knows yet; `more`: what the
        arrays hold that no program reads, of which any may be left out that the step does without.
        """
        host = self._staging.host
        for name, _, padding, _ in self._more:
            if name in more:
                count = len(more[name])
                host[name][:count] = more[name]
                host[name][count:] = padding
        for name in self._names:
            values, target = getattr(plan, name), host[name]
            if name == "block_table":
                target[: values.shape[0], : values.shape[1]] = values
                continue  # what lies beyond belongs to no context
            count = len(values)
            target[:count] = values
            target[count:] = plan.num_tokens if name == "query_start" else PADDING[name]
        count = len(plan.feed_positions)
        same = count == plan.num_tokens and _counts_up(plan.feed_positions) and _counts_up(plan.feed_rows)
        if count and not same:
            host["feed_positions"][:count] = plan.feed_positions
            host["feed_rows"][:count] = plan.feed_rows
        self._staging.upload()
        if not count:
            return
        input_ids = self.tensors["input_ids"]
        if same:  # the usual step: every sequence of the last step goes on, in its place
            input_ids[:count].copy_(last_tokens[:count])
            return
        positions, rows = self._staging.device["feed_positions"][:count], self._staging.device["feed_rows"][:count]
        input_ids.index_copy_(0, positions, last_tokens.index_select(0, rows).to(input_ids.dtype))


def _counts_up(values: Iterable[int]) -> bool:
    array = np.asarray(values)
    return bool((array == np.arange(len(array))).all())
