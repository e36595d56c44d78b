"""Collectives' kernels between two GPUs, in a CUDA graph that is replayed: the reference's sums, and the same bits on
both.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.ops.collectives.all_gather import gather_parts
from sidestream.ops.collectives.all_reduce import add_in_rank_order, all_reduce
from sidestream.ops.collectives.all_reduce_add_rms_norm_quant import all_reduce_add_rms_norm_quant, with_delta
from sidestream.ops.collectives.exchange import Exchange, free_exchange, open_exchange, unmap_peers
from sidestream.ops.collectives.tensor_parallel_group import RankGroup
from sidestream.ops.core.dtypes import residual_in_fp32, round_residual
from sidestream.ops.elementwise.rms_norm import rms_norm_quant
from support.ranks import run_on_ranks

REPLAYS = 10_000
COLUMNS, MOST_ROWS, SLOT_BYTES = 1024, 65, 64 << 10  # so the longest goes in three launches
WORLD = 2


class Launch:
    """One launch of each op in a graph, on parts that every replay changes, and what is wrong with its results.

    All ranks know all ranks' parts, so each computes the sums itself. `wrong`: elements that differ so far; `folded`:
    of the results' bits in all replays, for comparing ranks.
    """

    def __init__(self, group: RankGroup, exchange: Exchange, place: int, rows: int, one_shot: bool, form: str) -> None:
        self.group, self.one_shot, device = group, one_shot, exchange.memory.device
        draw = torch.Generator(device).manual_seed(rows)

        def random() -> torch.Tensor:
            return torch.randn(rows, COLUMNS, device=device, generator=draw).bfloat16()

        self.bases = [random() for _ in range(group.world)]
        self.delta, self.residual, self.weight = random() if form == "delta" else None, random(), random()[0]
        if form == "scaled":
            self.residual = round_residual(self.residual.float(), torch.float16, torch.bfloat16)
        self.keep, self.spread = form == "keep", form == "spread"
        self.part = self.bases[group.rank].clone()
        if form == "placed" and self.part.nbytes <= exchange.slot_bytes:
            self.part = exchange.places()[place][: self.part.nbytes].view(torch.bfloat16).view(rows, COLUMNS)
        self.wrong, self.folded = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        owned = self.spread and not one_shot
        self.own = slice(group.rank, None, group.world) if owned else slice(None)

    def run(self, step: torch.Tensor) -> None:
        """Launch both ops on parts that depend on `step` (int64, on the device), and count what is wrong."""
        factor = (1 + (step % 7)).bfloat16()
        torch.mul(self.bases[self.group.rank], factor, out=self.part)
        tail = (self.weight, 1e-5, self.group.name, self.keep, torch.int8, 8, self.spread)
        args = (self.part, self.residual, self.delta, *tail)
        out = all_reduce_add_rms_norm_quant.fake(*args)
        all_reduce_add_rms_norm_quant.launch(*args, out=out, pdl=True, one_shot=self.one_shot)
        total = torch.empty_like(self.part)
        all_reduce.launch(self.bases[self.group.rank], self.group.name, out=(total,), one_shot=self.one_shot)
        y, q, scale, residual = out
        parts = [with_delta(base * factor, self.delta) for base in self.bases]
        summed = add_in_rank_order(parts) + residual_in_fp32(self.residual, torch.bfloat16)
        wanted = round_residual(summed, self.residual.dtype, torch.bfloat16)
        alone = rms_norm_quant(wanted, self.weight, 1e-5, self.keep, torch.int8, 8)
        self.wrong += (residual != wanted)[self.own].sum() + (total != add_in_rank_order(self.bases).bfloat16()).sum()
        gathered = gather_parts(self.bases[self.group.rank] * factor, self.group.name)
        self.wrong += (gathered != torch.stack([base * factor for base in self.bases])).sum()
        # a kernel may add up a row in another order: the last bit of its statistics may flip, and so a rounding
        self.wrong += ((q.int() - alone[1].int()).abs() > 2).sum()
        for got, want in ((scale, alone[2]), (y, alone[0])):
            self.wrong += (got.float() - want.float()).abs().gt(2**-6 * want.float().abs() + 1e-5).sum()
        self.folded.mul_(31).add_(q.view(torch.int32).sum()).add_(scale.view(torch.int32).sum())


def replayed(group: RankGroup) -> list[tuple[int, int]]:
    """(wrong, folded) of each launch after all replays."""
    device = torch.device("cuda", group.rank)
    exchange = open_exchange(group, device, SLOT_BYTES)
    step = torch.zeros((), dtype=torch.int64, device=device)
    cases = [(rows, one_shot) for rows in (1, 7, MOST_ROWS) for one_shot in (True, False)]
    forms = ("placed", "delta", "keep", "spread", "scaled")
    launches = [
        Launch(group, exchange, place % 2, *case, form)
        for place, (case, form) in enumerate((case, form) for case in cases for form in forms)
    ]

    def run() -> None:
        step.add_(1)
        for launch in launches:
            launch.run(step)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        run()
    for replay in range(REPLAYS):
        if replay % 100 == group.rank:
            torch.cuda._sleep(1_000_000)  # one of them is late
        graph.replay()
    torch.cuda.synchronize()
    found = [(int(launch.wrong), int(launch.folded)) for launch in launches]
    group.gather(torch.tensor([0]))  # the peer's kernels have ended
    unmap_peers(group)
    group.gather(torch.tensor([0]))
    free_exchange(group)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_ranks_hold_the_same_bits_through_all_replays(tmp_path: Path) -> None:
    results: list[Any] = run_on_ranks(WORLD, replayed, tmp_path, on_gpus=True)
    assert all(wrong == 0 for result in results for wrong, _ in result), results
    assert results[0] == results[1] and len({folded for _, folded in results[0]}) > 1
