"""lora_active: the adapters of each 128 tokens of a step."""

import pytest
import torch
from sidestream.ops.lora.plan import lora_active
from support.checks import EXACT, check_kernel


def mixes(tokens: int, slots: int) -> dict[str, list[int]]:
    """Which token has which adapter."""
    return {
        "none": [-1] * tokens,
        "one": [slots - 1] * tokens,
        "in turn": [token % slots for token in range(tokens)],
        "some without": [(token * 5 + token // 7) % (slots + 1) - 1 if token % 3 else -1 for token in range(tokens)],
        "the last alone": [-1] * (tokens - 1) + [min(1, slots - 1)],
    }


@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (128, 100), (300, 1024)])
@pytest.mark.parametrize("mix", mixes(1, 1))
def test_each_list_has_the_adapters_of_its_tokens(tokens: int, slots: int, mix: str) -> None:
    index = torch.tensor(mixes(tokens, slots)[mix], dtype=torch.int32)
    for row, part in zip(lora_active(index, slots).tolist(), index.split(128), strict=True):
        found = sorted(set(part.tolist()) - {-1})
        assert row == [len(found), *found, *[-1] * (slots - len(found))]


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (64, 8), (128, 100), (130, 17), (300, 1024)])
@pytest.mark.parametrize("mix", mixes(1, 1))
def test_kernel(tokens: int, slots: int, mix: str) -> None:
    check_kernel(lora_active, torch.tensor(mixes(tokens, slots)[mix], dtype=torch.int32), slots, tolerances={0: EXACT})


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (130, 17), (4096, 1024)])
def test_kernel_on_the_gpu(tokens: int, slots: int) -> None:
    index = torch.tensor(mixes(tokens, slots)["some without"], dtype=torch.int32, device="cuda")
    check_kernel(lora_active, index, slots, tolerances={0: EXACT}, pdl=True)
