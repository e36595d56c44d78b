"""The table of docs/quickstart.md: what a Llama takes of the disk and of the GPU.

python -m sidestream.tools.dev.pages.sizes            exit code 1 and a diff when the table is out of date
python -m sidestream.tools.dev.pages.sizes --write    put today's table in

Bytes are counted from the buffers of a compiled program, as the engine counts them when it starts. Two models with one
and two layers say what a layer takes and what the rest does.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ....ops.core.kv_layout import PAGE_SIZE
from ...options.models import LLAMA_8B
from .excerpts import keep_true
from .performance import table

PAGE = Path(__file__).parents[3] / "docs" / "quickstart.md"
GB = 1e9
RANK = 16
LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "Llama 3.2 1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Llama 3.2 3B": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "Llama 3.1 8B": {},
}


@cache
def _bytes(name: str, layers: int) -> tuple[int, int, int, int]:
    """(bf16 checkpoint, weights, a KV page, an adapter's slot) of a Llama with so many layers."""
    import torch

    from ....compiler.api import compile_model
    from ....compiler.program.program import Bucket
    from ....graphs.config import LlamaConfig
    from ....graphs.llama import Llama
    from ....graphs.lora import LoraShape
    from ....runtime.worker.memory_budget import kv_specs, nbytes, specs_of

    config = LlamaConfig.from_dict({**LLAMA_8B, **LLAMAS[name], "num_hidden_layers": layers})
    model = Llama(config, LoraShape(1, RANK), torch.bfloat16, "meta")
    program = compile_model(model, text=False).program(Bucket(8, 8, 64, 8, decode=True, lora=True))
    parameters = dict(model.named_parameters())
    checkpoint = sum(2 * each.numel() for each in parameters.values())
    weights, page = nbytes(specs_of(program, "weight")), nbytes(kv_specs(program, 1))
    return checkpoint, weights, page, nbytes(specs_of(program, "adapter"))


def _whole(name: str) -> tuple[float, ...]:
    layers = {**LLAMA_8B, **LLAMAS[name]}["num_hidden_layers"]
    return tuple(one + (layers - 1) * (two - one) for one, two in zip(_bytes(name, 1), _bytes(name, 2), strict=True))


def sizes(names: Iterable[str] = tuple(LLAMAS)) -> str:
    """The table, in decimal gigabytes and megabytes."""
    rows = []
    for name in names:
        checkpoint, weights, page, slot = _whole(name)
        rows.append(
            [
                name,
                f"{checkpoint / GB:.1f} GB",
                f"{weights / GB:.1f} GB",
                f"{page / PAGE_SIZE * 1000 / 1e6:.0f} MB",
                f"{slot / 1e6:.0f} MB",
            ]
        )
    head = ["model", "bf16 checkpoint", "weights", "1,000 tokens of KV cache", f"an adapter's slot, rank {RANK}"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    return keep_true("python -m sidestream.tools.dev.pages.sizes", str(__doc__), {PAGE: {"sizes": sizes}}, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
