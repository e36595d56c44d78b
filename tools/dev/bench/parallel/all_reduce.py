"""What the sum over the ranks of a group takes, with the residual sum, norm and quantization that follow.

    python -m sidestream.tools.dev.bench.parallel.all_reduce --world 2 --output-json all-reduce.json

Each rank has a GPU and a process. A CUDA graph has 200 launches in a row, with programmatic dependent launch; the
median replay of the slowest rank counts. Every form is compared with the reference before it is timed. The rows:

    placed      one kernel, parts written by their producers where the peers read them
    copied      one kernel that brings its part there itself, with a LoRA delta
    sum         the sum alone (all_reduce)
    nccl        NCCL's all-reduce, then add_rms_norm_quant

"one" and "two" are the one-shot and two-shot forms; the op takes the one marked with *. The floor is what the bytes
from the peers take at what reads over NVLink reach (394 GB/s on two H200).
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .....compiler.cost.hardware import gpu_of
from ....bench.gpu_time import captured, elapsed_us
from ....options.engine import positive
from ....options.environment import collect

LAUNCHES = 200  # of a graph, an even number: producers' places take turns over replays too
ASKED_US = {1: 8.0, 64: 11.0, 256: 18.0}  # of the fused op, for 8,192 columns and two GPUs


@dataclass(frozen=True)
class Row:
    """Microseconds of one launch; `chosen`: the form that the op takes for so many bytes."""

    tokens: int
    what: str
    form: str
    us: float
    floor_us: float
    chosen: bool


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=positive, default=2, help="GPUs (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 1024], metavar="T")
    parser.add_argument("--columns", type=positive, default=8192, help="of a row (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=15, help="timed replays (default: %(default)s)")
    parser.add_argument("--output-json", type=Path, default=Path("all-reduce.json"), metavar="FILE")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures and prints the table. Raises ValueError where there are fewer GPUs."""
    import torch
    from torch import multiprocessing

    options = arguments().parse_args(argv)
    if torch.cuda.device_count() < options.world:
        raise ValueError(f"{options.world} ranks need as many GPUs; this machine has {torch.cuda.device_count()}")
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast stays off, in NCCL as in the kernels
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_rank, (options, directory), nprocs=options.world)
    return 0


def _rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    import torch
    from torch import distributed

    from .....ops.collectives.exchange import open_exchange
    from .....ops.collectives.group import RankGroup, register_group, tensor_parallel_group

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=f"file://{directory}/meet", rank=rank, world_size=options.world, device_id=device
    )
    group = RankGroup(tensor_parallel_group(options.world), rank, options.world, distributed.group.WORLD)
    register_group(group)
    exchange = open_exchange(group, device)
    rows = []
    for tokens in options.tokens:
        for row in measure(group, exchange, tokens, options.columns, options.repeats):
            rows.append(row)
            if rank == 0:
                asked = ASKED_US.get(tokens) if options.columns == 8192 and options.world == 2 else None
                wanted = f"  asked: {asked:g}" if asked is not None and row.what in ("placed", "copied") else ""
                print(
                    f"{row.tokens:>6}  {row.what:<8}{row.form:<4}{'*' if row.chosen else ' '}{row.us:>8.2f} us"
                    f"  floor {row.floor_us:>7.2f}{wanted}",
                    flush=True,
                )
    if rank == 0:
        table = {"world": options.world, "columns": options.columns, "rows": [asdict(row) for row in rows]}
        options.output_json.write_text(json.dumps({**table, "environment": collect()}, indent=2) + "\n")
        print(f"wrote {options.output_json}")
    distributed.destroy_process_group()


def measure(group: Any, exchange: Any, tokens: int, columns: int, repeats: int) -> Iterator[Row]:
    """Every row of one token count, the same on all ranks."""
    import torch

    from .....ops.collectives.all_reduce import all_reduce
    from .....ops.collectives.all_reduce_add_rms_norm_quant import all_reduce_add_rms_norm_quant, from_all_parts
    from .....ops.collectives.exchange import bytes_from_peers, is_one_shot
    from .....ops.elementwise.rms_norm import add_rms_norm_quant

    device, dtype, fused = exchange.memory.device, torch.bfloat16, all_reduce_add_rms_norm_quant
    draw = torch.Generator(device).manual_seed(tokens)  # all ranks draw all ranks' parts
    parts = [torch.randn(tokens, columns, device=device, generator=draw).to(dtype) for _ in range(group.world)]
    delta, residual = torch.zeros_like(parts[0]), torch.randn(tokens, columns, device=device, generator=draw).to(dtype)
    weight, part = torch.ones(columns, device=device, dtype=dtype), parts[group.rank]
    wanted = from_all_parts(parts, residual, weight, 1e-5, False, torch.int8, 8)
    tail = (weight, 1e-5, group.name, False, torch.int8, 8, True)
    out = fused.fake(part, residual, None, *tail)
    total = torch.empty_like(part)

    def run_fused(where: torch.Tensor, delta: torch.Tensor | None, one_shot: bool) -> None:
        fused.launch(where, residual, delta, *tail, out=out, pdl=True, one_shot=one_shot)

    def run_nccl() -> None:
        total.copy_(part)
        torch.distributed.all_reduce(total, group=group.processes)
        add_rms_norm_quant.launch(total, residual, None, weight, 1e-5, False, torch.int8, 8, out=out)

    def align() -> None:
        all_reduce.launch(part[:1], group.name, out=(total[:1],))

    chosen = is_one_shot(part.nbytes, group.world)

    linked = 1e9 * gpu_of(device).nvlink_gbs

    def floor_us(one_shot: bool, gathered: int) -> float:
        return bytes_from_peers(part.nbytes, gathered, group.world, one_shot) / linked * 1e6

    places = _placed(exchange, part)
    for one_shot, form in ((True, "one"), (False, "two")):
        chained: list[tuple[str, Sequence[Callable[[], None]]]] = [
            ("placed", [partial(run_fused, place, None, one_shot) for place in places]),
            ("copied", [partial(run_fused, part, delta, one_shot)] * 2),
        ]
        for what, launches in chained:
            if not launches:
                continue
            launches[0]()
            _check(out, wanted, group, owned=not one_shot)
            us = _slowest(launches, align, repeats, group)
            yield Row(tokens, what, form, us, floor_us(one_shot, part.numel()), one_shot == chosen)
        sums = [partial(all_reduce.launch, part, group.name, out=(total,), pdl=True, one_shot=one_shot)] * 2
        sums[0]()
        us = _slowest(sums, align, repeats, group)
        yield Row(tokens, "sum", form, us, floor_us(one_shot, part.nbytes), one_shot == chosen)
    run_nccl()
    us = _slowest([run_nccl] * 2, align, repeats, group)
    yield Row(tokens, "nccl", "", us, floor_us(False, part.nbytes), False)


def _placed(exchange: Any, part: Any) -> list[Any]:
    """Two copies of a rank's part where its peers may read it; none where there is no room."""
    if part.nbytes > exchange.slot_bytes:
        return []
    places = [place[: part.nbytes].view(part.dtype).view(part.shape) for place in exchange.places()[:2]]
    return [place.copy_(part) for place in places]


def _check(out: Any, wanted: Any, group: Any, owned: bool) -> None:
    """Raises ValueError where the kernel's results are not the reference's."""
    rows = slice(group.rank, None, group.world) if owned else slice(None)
    steps = (out[1].int() - wanted[1].int()).abs().max()
    if steps > 2 or not out[3][rows].equal(wanted[3][rows]):
        raise ValueError(f"rank {group.rank}: the kernel is {int(steps)} steps off, or its residual is wrong")


def _slowest(launches: Sequence[Callable[[], None]], align: Callable[[], None], repeats: int, group: Any) -> float:
    """Microseconds of a launch on the slowest rank: the median replay after two that warm up."""
    import torch

    graph, times = captured(launches, LAUNCHES // len(launches)), []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        torch.distributed.barrier(group=group.processes)
        align()  # the ranks begin together
        times.append(elapsed_us(graph.replay) / LAUNCHES)
    median = torch.tensor([statistics.median(times[2:])], device="cuda")
    torch.distributed.all_reduce(median, torch.distributed.ReduceOp.MAX, group=group.processes)
    return float(median)


if __name__ == "__main__":
    raise SystemExit(main())
