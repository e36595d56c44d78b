"""docs/scaling.md says when several GPUs are better one engine and when several."""

import re

from sidestream.tools.pages.excerpts import TABLE
from sidestream.tools.pages.ranks import PAGE, parallel


def shown() -> str:
    (table,) = (found["text"] for found in TABLE.finditer(PAGE.read_text()) if found["name"] == "parallel")
    return table


def test_a_row_is_what_the_cost_model_computes() -> None:
    row = parallel(["Llama 3.1 8B"], [2]).splitlines()[-1]
    assert row in shown(), "run `python -m sidestream.tools.pages.ranks --write`"


def test_ranks_share_weights_and_answer_one_request_sooner() -> None:
    for model in ("8B", "70B"):
        rows = re.findall(
            rf"\| Llama 3.1 {model} \| [248] \| (\S+) / (\S+) \| (\S+) / (\S+) \| (\S+) / (\S+) ", shown()
        )
        assert len(rows) == 3
        for row in rows:
            weights, whole, room, spread, step, alone = map(float, row)
            assert weights < whole and room > spread and step < alone
