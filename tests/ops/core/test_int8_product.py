"""Products of int8 matrices are exact, in whatever way they are made."""

import pytest
import torch
from sidestream.ops.core import int8_product as module
from sidestream.ops.core.int8_product import EXACT_COLUMNS, int8_product


@pytest.fixture(params=["as this CPU does", "by fp32"])
def way(request, monkeypatch):
    if request.param == "by fp32":
        monkeypatch.setattr(module, "_takes_int_mm", lambda device: False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 16, 8), (3, 130, 7), (2, 5, 2 * EXACT_COLUMNS + 9)])
def test_every_sum_is_exact(shape):
    tokens, columns, rows = shape
    torch.manual_seed(columns)
    for low, high in ((-128, 128), (-128, -127), (127, 128)):
        x = torch.randint(low, high, (2, tokens, columns), dtype=torch.int8)
        weight = torch.randint(low, high, (rows, columns), dtype=torch.int8)
        product = int8_product(x, weight)
        assert product.dtype == torch.int32
        assert torch.equal(product.double(), x.double() @ weight.double().T)


@pytest.mark.usefixtures("way")
def test_columns_of_a_larger_matrix_are_taken_as_they_lie():
    for columns in (slice(16, 48), slice(96, 96)):
        x, weight = (torch.randint(-128, 128, (rows, 96), dtype=torch.int8)[:, columns] for rows in (5, 9))
        assert torch.equal(int8_product(x, weight).double(), x.double() @ weight.double().T)


def test_a_row_has_the_same_product_in_every_batch():
    x, weight = (torch.randint(-128, 128, (rows, 3000), dtype=torch.int8) for rows in (64, 33))
    together = int8_product(x, weight)
    assert all(torch.equal(int8_product(x[row : row + 1], weight)[0], together[row]) for row in range(64))
