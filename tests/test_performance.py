"""docs/performance.md and the README show what was measured, and nothing else."""

import json
from pathlib import Path

import pytest
from sidestream.tools.dev.pages.excerpts import ExcerptError, rewritten
from sidestream.tools.dev.pages.performance import MEASUREMENTS, PAGES, TABLES, main


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_is_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table: " in text
    assert rewritten(text, TABLES) == text, "run `python -m sidestream.tools.dev.pages.performance --write`"


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


def test_what_other_pages_say_of_the_ablation() -> None:
    rows = json.loads((MEASUREMENTS / "bench_ablation_h200.json").read_text())["ablation"]
    us = {(row["arm"], row["tokens"], bool(row["adapters"])): row["us_per_layer"] for row in rows}
    tokens = sorted({place[1] for place in us})

    def span(longer: str, adapters: bool, over: bool) -> list[float]:
        return sorted(us[longer, count, adapters] / us["everything on", count, over] for count in tokens)

    pages = MEASUREMENTS.parent
    serial, side = span("LoRA as serial", True, False), span("everything on", True, False)
    slow, fast = (f"{times[0] * 100 - 100:.0f} to {times[-1] - 1:.0%} longer" for times in (serial, side))
    for page in (pages / "how_it_works.md", pages.parent / "README.md"):
        assert slow in page.read_text() and fast in page.read_text()
    wide = sorted(span("everything in 16 bits", False, False) + span("everything in 16 bits", True, True))
    told = (pages / "tuning.md").read_text()
    assert f"takes {wide[0]:.1f} to {wide[-1]:.1f} times as long" in told


def test_what_the_tuning_page_says_of_adapters() -> None:
    shares = sorted(line.split("|")[-2].strip() for line in TABLES["latency"]().splitlines()[2:])
    least, most = (share.removeprefix("0.") for share in (shares[0], shares[-1]))
    told = (MEASUREMENTS.parent / "tuning.md").read_text()
    assert f"a GPU gives {least} to {most}% of the tokens per second" in told
