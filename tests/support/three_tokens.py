"""A decode step of three sequences whose tensors depend on their names alone: what two programs of one model compute
can be compared.
"""

from collections.abc import Sequence

import torch
from sidestream.compiler.program.program import Bucket, Program
from sidestream.compiler.run.bound_program import BoundProgram

STEP = Bucket(3, 3, 12, 2, decode=True, lora=False)
STEP_LORA = Bucket(3, 3, 12, 2, decode=True, lora=True)
PROMPTS_LORA = Bucket(3, 3, 12, 2, decode=False, lora=True)  # a prompt's program, which may hold prompts of one token


def logits(made: Program, adapters: Sequence[int] = (-1, -1, -1)) -> torch.Tensor:
    """What a program of one of these buckets computes from random weights and caches; `adapters`: each token's slot."""
    tensors = {}
    for buffer in made.of_kind("input", "weight", "adapter"):
        values = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(sum(map(ord, buffer.name))))
        if buffer.name.endswith("_scale"):
            values = values.abs() * 0.03 + 0.01
        elif "norm" in buffer.name:
            values = 1 + 0.1 * values
        tensors[buffer.name] = (30 * values if buffer.dtype == torch.int8 else values).to(buffer.dtype)
    integers = {
        "input_ids": [5, 6, 7],
        "positions": [70, 0, 9],
        "slot_mapping": [6, 128, 265],
        "block_table": [[1, 0], [2, 3], [4, 5]],
        "context_lens": [71, 1, 10],
        "query_start": [0, 1, 2, 3],
        "logits_indices": [0, 1, 2],
        "adapter_index": [*adapters],
    }
    tensors.update(
        {
            name: torch.tensor(value, dtype=made.by_name[name].dtype)
            for name, value in integers.items()
            if name in made.by_name
        }
    )
    with torch.no_grad():
        return BoundProgram(made, tensors, "cpu", poison=True).run()[0].float()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|."""
    return float((got - want).norm() / want.norm())
