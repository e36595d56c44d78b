"""The tables of `sidestream eval` on a terminal, from what was measured on a GPU: nothing is lost, and they fit."""

import json
import re
from pathlib import Path

import pytest
from sidestream.compiler.records import columns
from sidestream.tools.quality.evaluate import Round
from sidestream.tools.quality.report import rounds_of, tables, verdicts

MEASUREMENTS = Path(__file__).parents[3] / "docs" / "measurements"


@pytest.fixture(scope="module")
def rounds() -> list[Round]:
    return rounds_of(json.loads((MEASUREMENTS / "quality_h200.json").read_text()))


def test_tables_and_verdicts_fit_a_hundred_columns(rounds: list[Round]) -> None:
    for found in rounds:
        for text in (*(table.text() for table in tables(found)), verdicts(found)):
            assert max(map(len, text.splitlines())) <= 100


def test_a_table_that_goes_on_below_loses_no_cell(rounds: list[Round]) -> None:
    for table in tables(rounds[0]):
        shown = table.text()
        for head, *cells in zip(*table.rows, strict=True):
            assert re.search(rf"(^|  ){re.escape(head)}(  |$)", shown, re.MULTILINE)
            assert all(cell in shown for cell in cells)


def test_columns_go_on_below_with_their_keys() -> None:
    rows = [("name", "first", "second"), ("a", "1" * 10, ""), ("b", "2" * 10, "x" * 10)]
    assert columns(rows, right=(2,), width=20).splitlines() == [
        "name  first",
        "----  ----------",
        "a     1111111111",
        "b     2222222222",
        "",
        "name      second",
        "----  ----------",
        "b     xxxxxxxxxx",
    ]
    assert columns(rows, width=28) == columns(rows)
