"""docs/performance.md and the README show what was measured, and nothing else."""

import json
from pathlib import Path

import pytest
from sidestream.tools.pages.excerpts import ExcerptError, rewritten
from sidestream.tools.pages.performance import MEASUREMENTS, PAGES, TABLES, main


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_is_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table: latency -->" in text
    assert rewritten(text, TABLES) == text, "run `python -m sidestream.tools.pages.performance --write`"


def test_the_latency_table_has_the_raw_figures() -> None:
    rows = json.loads((MEASUREMENTS / "bench_latency_h200.json").read_text())["rows"]
    text = TABLES["latency"]()
    for row in rows:
        assert f"| {row['ms_per_step']:.2f} |" in text


def test_a_changed_figure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: prefill -->\n| made up |\n<!-- end -->\n")
    assert main(["--page", str(page)]) == 1
    assert "-| made up |" in capsys.readouterr().out
    with pytest.raises(ExcerptError, match="no excerpt 'prices'"):
        rewritten("<!-- table: prices -->\n<!-- end -->\n", TABLES)
