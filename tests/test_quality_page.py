"""docs/quality.md is what was measured, and its top says what the tables say."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sidestream.tools.dev.pages.quality import DOCS, PAGE, PICTURE, main, measured, picture
from sidestream.tools.quality.report import rounds_of
from sidestream.tools.quality.summary import ARMS


def test_the_page_is_what_was_measured() -> None:
    assert PAGE.read_text() == measured(), "run `python -m sidestream.tools.dev.pages.quality --write`"


def test_the_picture_is_what_was_measured() -> None:
    assert PICTURE.read_text() == picture(), "run `python -m sidestream.tools.dev.pages.quality --write`"


def test_the_picture_shows_the_arms_of_the_summary_and_folds_the_others() -> None:
    texts = [text.text or "" for text in ElementTree.fromstring(picture()).iter("{http://www.w3.org/2000/svg}text")]
    arms, again = clean()
    first = texts[texts.index("The model as it is") + 1 : texts.index("With outliers (injected)")]
    names = [text for text in first if not re.fullmatch(r"[\d.e-]+", text)]
    others = sum(not arm["control"] and name not in ARMS for name, arm in arms.items())
    assert names == [
        again["arm"],
        "bf16-unfused",
        "int8 (default of 0.1.0)",
        "fp8",
        "fp8-tensorwise",
        f"{others} other arms",
    ]
    worst = max(one["mean_kl"][0] for one in arms["int8"]["divergences"])
    assert first[first.index("int8 (default of 0.1.0)") + 1] == f"{worst:.3g}"
    assert len(texts) < 60 and max(map(len, names)) < 25, "readable at the width of a page"


def clean() -> tuple[dict[str, Any], dict[str, Any]]:
    """The clean round's arms by name, and bf16 at another load."""
    found = json.loads((DOCS / "measurements" / "quality_h200.json").read_text())["rounds"][0]
    return {arm["arm"]: arm for arm in found["arms"]}, found["again"]


def flips(arm: dict[str, Any]) -> int:
    return arm["pooled"]["worse"] + arm["pooled"]["better"]


def figures(text: str) -> set[str]:
    """The numbers in a text, spelled as they are there."""
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))


def summary() -> str:
    """The part of the page before the details."""
    return PAGE.read_text().partition("\n## What is compared")[0]


def test_the_summary_has_the_raw_figures() -> None:
    arms, _ = clean()
    default, limit = arms["int8"], 2 * flips(arms["bf16-unfused"])
    assert {f"{flips(default):,}", f"{default['pooled']['items']:,}", str(limit)} <= figures(summary())
    assert f"| int8 | {max(one['mean_kl'][0] for one in default['divergences']):.2e} |" in summary()


def test_fp8_as_other_engines_serve_it_fails() -> None:
    judged = rounds_of(json.loads((DOCS / "measurements" / "quality_h200.json").read_text()))[0].results
    assert {"fp8", "fp8-tensorwise"} <= {result.arm for result in judged if result.failed}


def test_the_readme_has_the_raw_figures() -> None:
    """Those of the default."""
    raw = (DOCS / "measurements/quality_default_h200.txt").read_text()
    row = r"{} +\S+ +\S+ +(\S+)% +(\S+)% +([\d,]+) of ([\d,]+) +\+([\d.]+)  identical to bf16"
    [(reference, right, changed, items, loss)] = re.findall(row.format("\nint8"), raw)
    [(*_, own, _, _)] = re.findall(row.format("\nbf16-unfused"), raw)
    flipped = {changed, items, str(2 * int(own))}
    assert flipped | {reference, right, loss} <= figures((DOCS.parent / "README.md").read_text())
    assert flipped <= figures(summary())


def test_a_changed_figure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("1.95e-03", "0.00e+00"))
    assert main(["--page", str(page)]) == 1 and "-| int8 | 0.00e+00" in capsys.readouterr().out
    assert main(["--page", str(page), "--write"]) == 0 and page.read_text() == PAGE.read_text()
