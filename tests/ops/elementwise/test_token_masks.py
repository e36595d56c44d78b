"""Masks in `argmax` and `sample`: as if the excluded logits had been -inf, and rows without a mask as before."""

import numpy as np
import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.elementwise.argmax import argmax
from sidestream.ops.elementwise.sample import sample
from support.checks import poison
from support.sm90 import launched

SHAPES = [(5, 131), (3, 9001), (2, 32), (4, 70001), (13, 515)]
"""Rows, of one sequence each or of several drafts of a sequence, and tokens."""


def some_masks(rows: int, vocabulary: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed masks, which holds for a row, the same as booleans [rows, vocabulary]): two rows share a mask, one has
    none, and of one mask a single bit is set. Bits beyond the vocabulary are set as well.
    """
    words = -(-vocabulary // 32)
    allowed = torch.rand(3, words * 32) < 0.1
    allowed[:, vocabulary:] = True
    allowed[1, :vocabulary] = False
    allowed[1, vocabulary - 1] = True
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32)
    which = torch.tensor(([0, -1, 1, 0, 2] * 3)[:rows], dtype=torch.int32)
    plain = torch.where((which < 0)[:, None], True, allowed[which.clamp_min(0).long()])[:, :vocabulary]
    return torch.from_numpy(packed).to(device), which.to(device), plain.to(device)


def numbers(rows: int, temperature: float, top_k: int, top_p: float) -> list[torch.Tensor]:
    columns = [torch.full((rows,), value) for value in (temperature, float(top_k), top_p, 0.01)]
    columns[1] = columns[1].to(torch.int32)
    return [*columns, torch.arange(rows), torch.full((rows,), 3)]


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_excluded_tokens_are_as_if_they_were_impossible(rows: int, vocabulary: int) -> None:
    logits = torch.randn(rows, vocabulary) * 3
    masks, which, allowed = some_masks(rows, vocabulary)
    banned = logits.where(allowed, -torch.inf)
    assert torch.equal(argmax(logits, masks, which), argmax(banned))
    for settings in ((1.0, 0, 1.0), (0.7, 5, 0.8), (0.0, 0, 1.0)):
        args = numbers(rows, *settings)
        tokens = sample(logits, *args, masks, which)
        assert torch.equal(tokens, sample(banned, *args))
        assert allowed.gather(1, tokens.long()[:, None]).all()


def test_a_mask_of_nothing_gives_no_token_and_hides_no_fault() -> None:
    logits = torch.zeros(3, 40)
    logits[2, 7] = torch.nan
    masks, which = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, -1, 1], dtype=torch.int32)
    masks[1, 0] = 1
    assert argmax(logits, masks, which).tolist() == [-1, 0, -1]
    tokens = sample(logits, *numbers(3, 1.0, 0, 1.0), masks, which)
    assert tokens[0] == tokens[2] == -1 and tokens[1] >= 0


def check(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> None:
    logits = (torch.randn(rows, vocabulary) * 3).to(dtype).to(device)
    logits[0, vocabulary // 2] = torch.nan if rows > 4 else 1.0
    masks, which, _ = some_masks(rows, vocabulary, device)
    tokens = poison(argmax.fake(logits))
    argmax.launch(logits, masks, which, out=(tokens,))
    assert torch.equal(tokens.cpu(), argmax.reference(logits.cpu(), masks.cpu(), which.cpu()))
    for settings in ((1.0, 0, 1.0), (0.7, 5, 0.8), (0.0, 0, 1.0)):
        args = [arg.to(device) for arg in numbers(rows, *settings)]
        tokens = poison(OPS["sample"].fake(logits, *args))
        OPS["sample"].launch(logits, *args, masks, which, out=(tokens,))
        assert torch.equal(tokens, OPS["sample"].reference(logits, *args, masks, which))


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_kernels(rows: int, vocabulary: int) -> None:
    check(rows, vocabulary, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128256, 32003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu(vocabulary: int, dtype: torch.dtype) -> None:
    check(5, vocabulary, dtype, "cuda")


def test_masks_that_do_not_fit_are_refused() -> None:
    logits, masks, which, _ = torch.zeros(2, 131), *some_masks(2, 131)
    for given in ((masks[:, :4].contiguous(), which), (masks, which[:1]), (masks, None)):
        with pytest.raises(ValueError, match="argmax"):
            argmax.launch(logits, *given, out=(argmax.fake(logits),))


def test_machine_code() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    logits = meta(64, 128256, dtype=torch.bfloat16)
    masks, which = meta(64, 4008, dtype=torch.int32), meta(64, dtype=torch.int32)
    columns = [meta(64), which, meta(64), meta(64), *(meta(64, dtype=torch.int64) for _ in range(2))]
    for op, args in ((argmax, ()), (OPS["sample"], columns)):
        (code,) = launched(op, logits, *args, masks, which, pdl=True)
        assert code.spills == 0
