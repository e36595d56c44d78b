"""Figures of the evaluation models in the README are those of the raw output."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def figures(text: str) -> set[str]:
    """The numbers in a text, spelled as they are there."""
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))


def test_the_readme_has_the_raw_figures() -> None:
    """Those of the default."""
    raw = (DOCS / "measurements/quality_default_h200.txt").read_text()
    row = r"{} +\S+ +\S+ +(\S+)% +(\S+)% +([\d,]+) of ([\d,]+) +\+([\d.]+)  identical to bf16"
    [(reference, right, changed, items, loss)] = re.findall(row.format("\nint8"), raw)
    [(*_, own, _, _)] = re.findall(row.format("\nbf16-unfused"), raw)
    flipped = {changed, items, str(2 * int(own))}
    assert flipped | {reference, right, loss} <= figures((DOCS.parent / "README.md").read_text())
