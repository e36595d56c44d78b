"""The greedy token: torch's own argmax is the oracle, ties go to the lowest id, and every cut of a row into pieces
gives the same.
"""

import pytest
import torch
from sidestream.ops.rows.argmax import argmax
from support.checks import poison
from support.sm90 import launched

SHAPES = [(1, 9001), (3, 70000), (5, 131), (2, 1), (140, 5000)]


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Few distinct values, so that many ids tie."""
    return (torch.randn(rows, vocabulary) * 4).round().to(dtype).to(device)


def check(logits: torch.Tensor, pdl: bool = False) -> None:
    for _ in range(2):  # the second launch finds the counters as the first has left them
        (out,) = (poison(argmax.fake(logits)),)
        argmax.launch(logits, out=(out,), pdl=pdl)
        expected = torch.tensor(
            [row.tolist().index(row.amax().item()) for row in logits.float().cpu()], dtype=torch.int32
        )
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_reference_is_the_first_of_the_largest(rows: int, vocabulary: int) -> None:
    logits = logits_of(rows, vocabulary, torch.float32)
    assert argmax(logits).tolist() == [row.tolist().index(row.amax().item()) for row in logits]


def test_nan_and_banned_tokens_lose() -> None:
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [float("-inf"), float("-inf"), -3.0]])
    assert argmax(logits).tolist() == [2, 2]
    assert argmax(torch.full((1, 5), float("-inf"))).tolist() == [0]


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_kernel(rows: int, vocabulary: int) -> None:
    check(logits_of(rows, vocabulary, torch.bfloat16))


@pytest.mark.interpret
def test_kernel_with_banned_tokens() -> None:
    logits = torch.full((2, 20000), float("-inf"))
    logits[1, 19999] = -7.0
    check(logits)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128256, 32003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu(vocabulary: int, dtype: torch.dtype) -> None:
    for rows in (1, 7, 64, 256):
        check(logits_of(rows, vocabulary, dtype, "cuda"), pdl=rows == 7)


def test_compiles_for_hopper_without_spills() -> None:
    (code,) = launched(argmax, torch.empty(1, 128256, dtype=torch.bfloat16, device="meta"), pdl=True)
    assert code.spills == 0
