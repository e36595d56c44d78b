"""The greedy token: torch's own argmax is the oracle, ties go to the lowest id, and every cut of a row into pieces
gives the same.
"""

import pytest
import torch
from sidestream.ops.elementwise.argmax import argmax
from support.checks import poison
from support.sm90 import launched

SHAPES = [(1, 9001), (3, 70000), (5, 131), (2, 1), (140, 5000)]


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Few distinct values, so that many ids tie."""
    return (torch.randn(rows, vocabulary) * 4).round().to(dtype).to(device)


def oracle(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.double().cpu()
    return torch.tensor(
        [row.tolist().index(row.amax().item()) if row.amax().isfinite() else -1 for row in rows], dtype=torch.int32
    )


def broken_logits(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Each second row holds one value that is no number, anywhere; the last row has only banned tokens."""
    logits = logits_of(rows, vocabulary, dtype, device)
    for row in range(0, rows, 2):
        value = (torch.nan, torch.inf)[row // 2 % 2]
        logits[row, torch.randint(vocabulary, ())] = value
    logits[-1] = -torch.inf
    return logits


def check(logits: torch.Tensor, pdl: bool = False) -> None:
    for _ in range(2):  # the second launch finds the counters as the first has left them
        (out,) = (poison(argmax.fake(logits)),)
        argmax.launch(logits, out=(out,), pdl=pdl)
        assert torch.equal(out.cpu(), oracle(logits))


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_reference_is_the_first_of_the_largest(rows: int, vocabulary: int) -> None:
    logits = logits_of(rows, vocabulary, torch.float32)
    assert argmax(logits).tolist() == [row.tolist().index(row.amax().item()) for row in logits]


def test_banned_tokens_lose_and_what_is_no_number_gives_no_token() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[nan, 1.0, 2.0], [-inf, -inf, -3.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [-inf, nan, inf]])
    assert argmax(logits).tolist() == [-1, 2, -1, -1, -1]
    for rows, vocabulary in SHAPES:
        some = broken_logits(rows, vocabulary, torch.bfloat16)
        assert torch.equal(argmax(some), oracle(some))


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_kernel(rows: int, vocabulary: int) -> None:
    check(logits_of(rows, vocabulary, torch.bfloat16))


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_kernel_with_what_is_no_number(rows: int, vocabulary: int) -> None:
    check(broken_logits(rows, vocabulary, torch.bfloat16))


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
        check(broken_logits(rows, vocabulary, dtype, "cuda"))


def test_compiles_for_hopper_without_spills() -> None:
    (code,) = launched(argmax, torch.empty(1, 128256, dtype=torch.bfloat16, device="meta"), pdl=True)
    assert code.spills == 0
