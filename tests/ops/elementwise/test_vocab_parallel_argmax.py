"""The best token of each part of a vocabulary, compared by keys, is the best token of all."""

import pytest
import torch
from sidestream.ops.elementwise.argmax import argmax
from sidestream.ops.elementwise.sample import sample
from sidestream.ops.elementwise.vocab_parallel_argmax import best_of_part, keys_of, tokens_of, values_of
from support.sm90 import launched

# rows, columns of a part, parts, tokens
CASES = [(3, 130, 2, 251), (2, 48, 4, 100), (5, 5000, 2, 9999), (1, 16, 8, 40)]
Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def logits_of(rows: int, tokens: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Few distinct values, so that many tokens tie; a row with NaN, one with an infinity, one that bans all."""
    logits = (torch.randn(rows, tokens) * 4).round()
    for row, value in zip(range(1, rows), (torch.nan, torch.inf), strict=False):
        logits[row, torch.randint(tokens, ())] = value
    if rows > 3:
        logits[3] = -torch.inf
    return logits.to(dtype).to(device)


def numbers_of(rows: int, device: str = "cpu") -> Numbers:
    """Temperatures, seeds and steps."""
    return (torch.rand(rows) + 0.3).to(device), torch.arange(rows, device=device) + 2**40, torch.arange(rows).to(device)


def from_parts(
    logits: torch.Tensor, width: int, parts: int, numbers: Numbers | None, launches: bool = False
) -> torch.Tensor:
    """The tokens as ranks find them; what fills up the last parts would win if it counted."""
    filled = torch.full((logits.shape[0], width * parts), 99.0).to(logits)
    filled[:, : logits.shape[1]] = logits

    def best(*more: torch.Tensor) -> torch.Tensor:
        found = []
        for part in range(parts):
            own = filled[:, part * width : (part + 1) * width].contiguous()
            count = min(max(logits.shape[1] - part * width, 0), width)
            keys = best_of_part.fake(own, part * width, count)
            if launches:
                best_of_part.launch(own, part * width, count, *more, out=(keys,))
            else:
                keys = best_of_part(own, part * width, count, *more)
            found.append(keys)
        return torch.stack(found).amax(0)

    likeliest = best()
    largest = values_of(likeliest)
    tokens = tokens_of(likeliest if numbers is None else best(largest, *numbers))
    return tokens.where(largest.isfinite(), -1)


def from_all(logits: torch.Tensor, numbers: Numbers | None) -> torch.Tensor:
    """The tokens as one process finds them."""
    if numbers is None:
        return argmax(logits)
    temperature, seeds, steps = numbers
    off = torch.zeros_like(temperature)
    return sample(logits, temperature, off.int(), off + 1, off, seeds, steps)


def check(rows: int, width: int, parts: int, tokens: int, dtype: torch.dtype, device: str, launches: bool) -> None:
    logits = logits_of(rows, tokens, dtype, device)
    for numbers in (None, numbers_of(rows, device)):
        assert torch.equal(from_parts(logits, width, parts, numbers, launches), from_all(logits, numbers))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_give_the_tokens_of_the_whole(case: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(*case, dtype, "cpu", launches=False)


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES)
def test_kernel(case: tuple[int, int, int, int]) -> None:
    check(*case, torch.bfloat16, "cpu", launches=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu(dtype: torch.dtype) -> None:
    for rows in (1, 7, 64, 256):
        check(rows, 64128, 2, 128256, dtype, "cuda", launches=True)


def test_keys_are_ordered_like_their_values_and_then_against_their_tokens() -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([-inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, inf, nan])
    keys = keys_of(values, torch.zeros(9, dtype=torch.int32))
    assert (keys[1:] >= keys[:-1]).all() and (keys[1:] == keys[:-1]).nonzero().tolist() == [[3]], "-0 is 0"
    assert torch.equal(values_of(keys)[:-1], values[:-1].where(values[:-1] != 0, 0.0)) and values_of(keys)[-1].isnan()
    tokens = torch.tensor([0, 5, 128255], dtype=torch.int32)
    same = keys_of(torch.full((3,), -2.5), tokens)
    assert torch.equal(tokens_of(same), tokens) and same.argmax() == 0


@pytest.mark.machine_code
def test_machine_code() -> None:
    logits, row = torch.empty(64, 64128, dtype=torch.bfloat16, device="meta"), torch.empty(64, device="meta")
    wide = torch.empty(64, dtype=torch.int64, device="meta")
    for more in ((), (row, row, wide, wide)):
        (code,) = launched(best_of_part, logits, 64128, 64128, *more, pdl=True)
        assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
