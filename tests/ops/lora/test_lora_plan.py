"""Tokens sorted by adapter and cut into tiles."""

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.lora.plan import lora_plan, lora_splits, lora_tile, num_tiles
from support.checks import check_kernel
from support.sm90 import launched


def distributions(tokens: int, slots: int) -> list[torch.Tensor]:
    """adapter_index: even, skewed, none, all the same, all different."""
    even = torch.randint(-1, slots, (tokens,))
    skewed = (torch.rand(tokens) ** 4 * (slots + 1)).long() - 1
    return [
        t.to(torch.int32)
        for t in (
            even,
            skewed,
            torch.full((tokens,), -1),
            torch.full((tokens,), slots - 1),
            torch.arange(tokens) % slots,
        )
    ]


@pytest.mark.parametrize(("tokens", "slots", "tile"), [(1, 1, 16), (7, 3, 2), (64, 8, 16), (300, 40, 32), (5, 256, 64)])
def test_every_token_is_in_one_tile_of_its_adapter(tokens: int, slots: int, tile: int) -> None:
    for adapter_index in distributions(tokens, slots):
        token_order, tiles = lora_plan(adapter_index, slots, tile)
        seen = []
        previous = -1
        for slot, first, count in tiles.tolist():
            assert 0 <= count <= tile
            if count:
                members = token_order[first : first + count]
                assert (adapter_index[members.long()] == slot).all() and slot >= previous
                assert (members.diff() > 0).all(), "tokens of one adapter keep their order"
                seen += members.tolist()
                previous = slot
        assert seen == token_order.tolist() and sorted(seen) == list(range(tokens))
        used = (tiles[:, 2] > 0).sum()
        assert (tiles[used:] == torch.tensor([-1, 0, 0])).all() and len(tiles) == num_tiles(tokens, slots, tile)


def test_unknown_slot_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[7\].*slots 0\.\.3"):
        lora_plan(torch.tensor([0, 7, 1], dtype=torch.int32), 4, 16)


def test_choices_are_within_limits() -> None:
    for tokens in (1, 8, 33, 64, 257, 8192):
        assert lora_tile(tokens) in (16, 32, 64)
        for k in (64, 2048, 4096, 14336, 28672):
            assert 1 <= lora_splits(k, tokens) <= 32
    assert lora_splits(4096, 8192) == 1 < lora_splits(4096, 1)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("tokens", "slots", "tile", "sm_budget"),
    [(1, 1, 16, None), (9, 3, 2, 1), (64, 8, 16, None), (300, 40, 32, 3), (40, 200, 64, None)],
)
def test_kernel(tokens: int, slots: int, tile: int, sm_budget: int | None) -> None:
    for adapter_index in distributions(tokens, slots):
        check_kernel(OPS["lora_plan"], adapter_index, slots, tile, sm_budget=sm_budget)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 2048, 8192])
@pytest.mark.parametrize("slots", [1, 8, 256])
def test_on_the_gpu(tokens: int, slots: int) -> None:
    for adapter_index in distributions(tokens, slots):
        check_kernel(OPS["lora_plan"], adapter_index.cuda(), slots, lora_tile(tokens), pdl=True)
        check_kernel(OPS["lora_plan"], adapter_index.cuda(), slots, lora_tile(tokens), sm_budget=2)


@pytest.mark.machine_code
@pytest.mark.parametrize(("tokens", "slots"), [(64, 32), (8192, 256)])
def test_machine_code(tokens: int, slots: int) -> None:
    (code,) = launched(
        lora_plan, torch.empty(tokens, dtype=torch.int32, device="meta"), slots, lora_tile(tokens), pdl=True
    )
    assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
