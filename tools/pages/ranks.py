"""The table of docs/scaling.md: one model over several GPUs next to one engine on each of them.

python -m sidestream.tools.pages.ranks            exit code 1 and a diff when the table is out of date
python -m sidestream.tools.pages.ranks --write    put today's table in

All of it is computed: steps by the cost model, memory from the buffers of compiled programs. Two models with one and
two layers say what a layer takes and what the rest does.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...ops.core.kv_layout import PAGE_SIZE
from ..options.models import LLAMA_8B, LLAMA_70B
from .excerpts import keep_true
from .performance import table

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
GB = 1e9
MEMORY = 141 * GB  # an H200's
USED = 0.9  # `gpu_memory_utilization` as it is without the option
REQUESTS = (1, 64, 256, 1024)
CONTEXT = 1024
GPUS = (1, 2, 4, 8)
MODELS: Mapping[str, Mapping[str, Any]] = {"Llama 3.1 8B": LLAMA_8B, "Llama 3.1 70B": LLAMA_70B}


@cache
def _compiled(name: str, layers: int, world: int) -> Any:
    import torch

    from ...compiler.api import compile_model
    from ...compiler.options import CompileOptions
    from ...graphs.config import LlamaConfig
    from ...graphs.llama import Llama

    config = LlamaConfig.from_dict({**MODELS[name], "num_hidden_layers": layers})
    model = Llama(config, None, torch.bfloat16, "meta")
    return compile_model(model, CompileOptions(tensor_parallel=world, gather_logits=world == 1), text=False)


@cache
def _some_layers(name: str, layers: int, world: int, requests: int) -> tuple[float, float, float]:
    """(seconds of a decode step, bytes of weights, bytes of a KV page) on one GPU."""
    from ...compiler.cost.cost import estimate, total_seconds
    from ...compiler.cost.work import Assumptions
    from ...compiler.program.program import Bucket
    from ...runtime.device.capacity import kv_specs, nbytes, specs_of

    blocks = CONTEXT // PAGE_SIZE
    bucket = Bucket(requests, requests, requests * blocks + 1, blocks, decode=True)
    program = _compiled(name, layers, world).program(bucket)
    seconds = total_seconds(estimate(program, Assumptions(context=CONTEXT)))
    return seconds, nbytes(specs_of(program, "weight")), nbytes(kv_specs(program, 1))


def _whole(name: str, world: int, requests: int) -> tuple[float, ...]:
    layers = MODELS[name]["num_hidden_layers"]
    few, more = (_some_layers(name, count, world, requests) for count in (1, 2))
    return tuple(one + (layers - 1) * (two - one) for one, two in zip(few, more, strict=True))


def _tokens(name: str, world: int) -> float:
    """Tokens of KV cache that one group of ranks has room for."""
    _, weights, page = _whole(name, world, 1)
    return (MEMORY * USED - weights) / page * PAGE_SIZE


def _step(name: str, world: int, requests: int) -> str:
    """Milliseconds of a step of so many requests, or "-" where their tokens have no room."""
    if requests * CONTEXT > _tokens(name, world):
        return "-"
    return f"{1e3 * _whole(name, world, requests)[0]:.1f}"


def parallel(names: Iterable[str] = tuple(MODELS), gpus: Iterable[int] = GPUS) -> str:
    """The table: in a cell what several ranks take, and what one engine a GPU takes for the same requests."""
    rows = []
    for name in names:
        for count in gpus:
            weights = [f"{_whole(name, world, 1)[1] / GB:.1f}" for world in (count, 1)]
            room = [f"{tokens / 1e6:.2f}" for tokens in (_tokens(name, count), count * _tokens(name, 1))]
            steps = [[_step(name, count, requests), _step(name, 1, max(1, requests // count))] for requests in REQUESTS]
            rows.append([name, str(count), *map(_pair, (weights, room, *steps))])
    head = ["model", "GPUs", "weights a GPU, GB", "room for tokens, millions"]
    return table([*head, *(f"ms/step, {each:,} request{'s' * (each > 1)}" for each in REQUESTS)], rows)


def _pair(cells: Sequence[str]) -> str:
    return cells[0] if cells[0] == cells[1] else " / ".join(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    return keep_true("python -m sidestream.tools.pages.ranks", str(__doc__), {PAGE: {"parallel": parallel}}, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
