"""The adapters that meet in a decode step."""

import pytest
import torch
from sidestream.ops.decoder_block.lora_groups import COUNTS, POSITIONS, lora_groups, lora_groups_reference, tile_tokens
from support.sm90 import launched

MIXES = [
    torch.randint(-1, slots, (tokens,), dtype=torch.int32) for tokens in (1, 3, 16, 17, 33, 64) for slots in (1, 5, 40)
]


@pytest.mark.parametrize("index", MIXES, ids=lambda index: str(len(index)))
def test_each_token_finds_its_adapter_in_each_list(index: torch.Tensor) -> None:
    groups = lora_groups(index)
    for level, parts in enumerate((1, 2, 4)):
        for token, adapter in enumerate(index.tolist()):
            row = parts - 1 + token * parts // tile_tokens(len(index))
            place = int(groups[POSITIONS + level, token])
            assert place == -1 if adapter < 0 else groups[row, place] == adapter and place < groups[COUNTS, row]
    for row in range(7):
        count = int(groups[COUNTS, row])
        found = groups[row, :count].tolist()
        assert len(set(found)) == count and min(found, default=0) >= 0 and (groups[row, count:] == -1).all()
    assert int(groups[COUNTS, 0]) == len(set(index.tolist()) - {-1})


def test_more_tokens_than_a_tile_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens; it takes up to 64"):
        lora_groups.fake(torch.zeros(65, dtype=torch.int32))


def check(index: torch.Tensor) -> None:
    out = torch.full_like(lora_groups.fake(index), -77)
    lora_groups.launch(index, out=(out,), pdl=index.is_cuda)
    assert torch.equal(out.cpu(), lora_groups_reference(index.cpu()))


@pytest.mark.interpret
@pytest.mark.parametrize("index", MIXES, ids=lambda index: str(len(index)))
def test_kernel_in_the_interpreter(index: torch.Tensor) -> None:
    check(index)


@pytest.mark.gpu
@pytest.mark.parametrize("index", MIXES, ids=lambda index: str(len(index)))
def test_kernel_on_a_gpu(index: torch.Tensor) -> None:
    check(index.cuda())


def test_kernel_is_one_small_launch() -> None:
    (code,) = launched(lora_groups, torch.zeros(64, dtype=torch.int32, device="meta"), pdl=True)
    assert code.spills == 0 and code.ptx_count("griddepcontrol") == 2
