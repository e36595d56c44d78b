"""Pairs sorted by group and cut into tiles, and the groups of LoRA on experts."""

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.lora.plan import lora_plan, num_tiles
from sidestream.ops.moe.plan import MANY_GROUPS, expert_groups, group_plan
from support.checks import check_kernel
from support.sm90 import launched


def distributions(pairs: int, groups: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Groups [P]: even, skewed, none, all on one group, all different (as far as there are groups)."""
    random = torch.Generator().manual_seed(seed)
    drawn = {
        "even": torch.randint(-1, groups, (pairs,), generator=random),
        "skewed": (torch.rand(pairs, generator=random) ** 6 * (groups + 1)).long() - 1,
        "none": torch.full((pairs,), -1),
        "one": torch.full((pairs,), groups - 1),
        "different": torch.randperm(pairs, generator=random) % groups,
    }
    return {name: each.to(torch.int32) for name, each in drawn.items()}


NAMES = list(distributions(1, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("pairs", "groups", "tile"),
    [(1, 8, 16), (40, 8, 1), (513, 128, 16), (1024, 8192, 32), (65536, 128, 128), (131072, 65536, 64)],
)
def test_order_is_a_stable_sort_and_tiles_hold_it(pairs: int, groups: int, tile: int, name: str) -> None:
    given = distributions(pairs, groups)[name]
    order, tiles = group_plan(given, groups, tile)
    assert torch.equal(order.long(), torch.sort(given, stable=True).indices)
    group, first, count = tiles.long().unbind(1)
    used = int((count > 0).sum())
    assert len(tiles) == num_tiles(pairs, groups, tile)
    assert (tiles[used:] == torch.tensor([-1, 0, 0])).all()
    assert count[:used].min() >= 1 and count.max() <= tile
    # one after another the tiles are the whole order, each of one group
    assert torch.equal(first[:used], count[:used].cumsum(0) - count[:used]) and int(count.sum()) == pairs
    assert torch.equal(group[:used].repeat_interleave(count[:used]), given[order.long()].long())
    if pairs <= MANY_GROUPS <= groups:
        assert (count[:used] == 1).all()
    else:  # a group's tiles are full but for its last
        same = group[: used - 1] == group[1:used]
        assert (count[: used - 1][same] == tile).all()


def test_it_is_the_plan_of_adapters() -> None:
    for given in distributions(300, 40).values():
        for mine, theirs in zip(group_plan(given, 40, 32), lora_plan(given, 40, 32), strict=True):
            assert torch.equal(mine, theirs)


def test_a_group_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[-2, 9\].*groups 0\.\.7"):
        group_plan(torch.tensor([0, 9, -2, 7], dtype=torch.int32), 8, 16)


def test_too_many_pairs_are_refused() -> None:
    groups = torch.empty((1 << 20) + 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"1048576 pairs.*not 1048577"):
        group_plan.launch(groups, 8, 16, out=group_plan.fake(groups, 8, 16))


def test_groups_of_adapters_experts() -> None:
    index = torch.tensor([2, -1, 0], dtype=torch.int32)
    experts = torch.tensor([[3, 0], [1, 2], [-1, -1]], dtype=torch.int32)
    assert expert_groups(index, experts, 4).tolist() == [11, 8, -1, -1, -1, -1]


# one launch as for adapters, tiles of one pair, and the counting sort in one block and in more
FORMS = [(1, 1, 16), (37, 8, 16), (300, 128, 32), (1, 8192, 16), (130, 8192, 16), (1030, 1100, 16), (2300, 8, 64)]


@pytest.mark.interpret
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pairs", "groups", "tile"), FORMS)
def test_kernels(pairs: int, groups: int, tile: int, name: str) -> None:
    check_kernel(OPS["group_plan"], distributions(pairs, groups)[name], groups, tile)


@pytest.mark.interpret
@pytest.mark.parametrize(("pairs", "groups", "tile", "name"), [(1030, 2100, 1, "even"), (2500, 300, 16, "skewed")])
def test_the_counting_sort_with_a_share_of_the_device(pairs: int, groups: int, tile: int, name: str) -> None:
    check_kernel(OPS["group_plan"], distributions(pairs, groups)[name], groups, tile, sm_budget=3)


@pytest.mark.interpret
def test_the_scan_of_more_blocks_than_it_loads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.ops.moe.plan._BLOCKS", 2)
    check_kernel(OPS["group_plan"], distributions(2500, 30)["even"], 30, 16)


@pytest.mark.interpret
def test_larger_blocks_bound_the_table_of_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.ops.moe.plan._MOST_COUNTS", 1101)
    check_kernel(OPS["group_plan"], distributions(1100, 1100)["even"], 1100, 16)


@pytest.mark.interpret
def test_kernel_of_groups() -> None:
    for tokens, top_k in ((1, 8), (300, 2)):
        index = torch.randint(-1, 5, (tokens,), dtype=torch.int32)
        experts = torch.randint(-1, 8, (tokens, top_k), dtype=torch.int32)
        check_kernel(OPS["expert_groups"], index, experts, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [1, 8, 512, 2048, 2056, 65536, 131072, 1 << 20])
@pytest.mark.parametrize(("groups", "tile"), [(8, 16), (128, 64), (8192, 16), (65536, 64)])
def test_on_the_gpu(pairs: int, groups: int, tile: int) -> None:
    for given in distributions(pairs, groups).values():
        check_kernel(OPS["group_plan"], given.cuda(), groups, tile, pdl=True)
        check_kernel(OPS["group_plan"], given.cuda(), groups, tile, sm_budget=2)


@pytest.mark.machine_code(each="pairs")
@pytest.mark.parametrize(
    ("pairs", "groups", "tile", "kernels"), [(512, 128, 16, 1), (64, 8192, 16, 1), (65536, 8192, 64, 3)]
)
def test_machine_code(pairs: int, groups: int, tile: int, kernels: int) -> None:
    codes = launched(group_plan, torch.empty(pairs, dtype=torch.int32, device="meta"), groups, tile, pdl=True)
    assert len(codes) == kernels
    assert all(code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1 for code in codes)
