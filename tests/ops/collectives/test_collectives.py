"""What ranks do together, between three processes over gloo: what each gets is what one process computes."""

from pathlib import Path

import pytest
import torch
from sidestream.ops.collectives.all_gather import all_gather
from sidestream.ops.collectives.all_reduce import all_reduce
from sidestream.ops.collectives.tensor_parallel_group import (
    GroupError,
    RankGroup,
    group_named,
    tensor_parallel_group,
    world_of,
)
from support.ranks import run_on_ranks

WORLD, COLUMNS = 3, 70
DTYPES = (torch.float32, torch.bfloat16)


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(rank)).to(dtype)


def together(group: RankGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine = [part(group.rank, dtype) for dtype in DTYPES]
    return [(all_reduce(each, group.name), all_gather(each, group.name, COLUMNS)) for each in mine]


def test_all_ranks_hold_the_same_sums_and_columns(tmp_path: Path) -> None:
    results = run_on_ranks(WORLD, together, tmp_path)
    for place, dtype in enumerate(DTYPES):
        parts = [part(rank, dtype) for rank in range(WORLD)]
        exact = torch.stack(parts).double().sum(0)
        for sums, columns in (result[place] for result in results):
            assert torch.equal(columns, torch.cat(parts, dim=-1)[:, :COLUMNS])
            assert torch.equal(sums, results[0][place][0])
            torch.testing.assert_close(sums.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_names_and_places_are_checked() -> None:
    assert world_of(tensor_parallel_group(4)) == 4
    with pytest.raises(GroupError, match="not a group's name"):
        world_of("everybody")
    with pytest.raises(GroupError, match="rank 2 of 2"):
        RankGroup("tp2", 2, 2)
    with pytest.raises(GroupError, match="belongs to no group 'tp512'"):
        group_named("tp512")
