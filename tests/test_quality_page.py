"""docs/quality.md is what was measured, and its top says what the tables say."""

import json
from pathlib import Path

import pytest
from sidestream.tools.pages.quality import DOCS, PAGE, main, measured


def test_the_page_is_what_was_measured() -> None:
    assert PAGE.read_text() == measured(), "run `python -m sidestream.tools.pages.quality --write`"


def test_the_top_has_the_raw_figures() -> None:
    clean = json.loads((DOCS / "measurements" / "quality_h200.json").read_text())["rounds"][0]
    default = next(arm for arm in clean["arms"] if arm["arm"] == "int8")
    top = PAGE.read_text().partition("\n## ")[0]
    flips, own = (each["pooled"]["worse"] + each["pooled"]["better"] for each in (default, clean["again"]))
    assert (
        f"{flips:,} of {default['pooled']['items']:,} answers change between right and wrong; our limit is {2 * own}"
        in top
    )
    missed = [condition["name"] for condition in default["conditions"] if condition["state"] != "met"]
    assert f"It does not meet: {', '.join(missed)}." in top
    assert f"| int8 | {max(one['mean_kl'][0] for one in default['divergences']):.2e} |" in top


def test_a_changed_figure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("1.95e-03", "0.00e+00"))
    assert main(["--page", str(page)]) == 1 and "-| int8 | 0.00e+00" in capsys.readouterr().out
    assert main(["--page", str(page), "--write"]) == 0 and page.read_text() == PAGE.read_text()
