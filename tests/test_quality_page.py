"""The figures of docs/quality.md and of the README's accuracy are those of the raw output in docs/measurements."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"
PAGE = (ROOT / "docs" / "quality.md").read_text()
ARMS = {each["arm"]: each for each in json.loads((MEASUREMENTS / "real_model_h200.json").read_text())["arms"]}
FORMS: dict[str, tuple[str, Callable[..., float]]] = {
    "mean_kl": ("{:.4f}", max),
    "top_1": ("{:.2%}", min),
    "perplexity_ratio": ("{:.4f}", max),
}
LIMITS = {"mean KL": ("mean_kl", 0.004), "top-1": ("top_1", 0.96), "perplexity": ("perplexity_ratio", 1.003)}


def tables() -> list[list[list[str]]]:
    """The tables of the page: rows of cells, without head and rule."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in each.splitlines()[2:]] for each in found]


READERS, SERVED, PARTS, QUESTIONS, MIXTURE, CONDITIONS = tables()


def test_tables_are_short() -> None:
    assert len(PAGE.splitlines()) <= 150
    assert all(len(table) <= 12 for table in tables())


def by_adapter(arm: str, figure: str) -> dict[str, float]:
    """The figure of an arm of the real model, by adapter."""
    return {each["adapter"]: each[figure][0] for each in ARMS[arm]["divergences"]}


def test_the_default_has_its_raw_figures_and_misses_the_limits_that_are_named() -> None:
    assert [row[0] for row in READERS] == list(by_adapter("int8-auto", "mean_kl"))
    for reader, *cells, misses in READERS:
        expected = [
            form.format(by_adapter(arm, name)[reader])
            for name, (form, _) in FORMS.items()
            for arm in ("int8-auto", "bf16")
        ]
        assert cells == expected
        missed = []
        for title, (name, limit) in LIMITS.items():
            figure = by_adapter("int8-auto", name)[reader]
            missed += [title] * (figure < limit if name == "top_1" else figure > limit)
        assert misses == (", ".join(missed) or "none")


@pytest.mark.parametrize("row", [*SERVED, *PARTS], ids=lambda row: row[0])
def test_an_arm_of_the_real_model_has_its_raw_figures(row: list[str]) -> None:
    arm = re.findall(r"`([^`]+)`", row[0])[0]
    expected = []
    for name in list(FORMS)[: (len(row) - 1) // 2]:
        form, worst = FORMS[name]
        figures = by_adapter(arm, name)
        expected += [form.format(figures.pop("base")), form.format(worst(figures.values()))]
    assert row[1:] == expected


def raw_rows(path: Path) -> dict[str, str]:
    """The rows of the clean round's table of all arms, by arm; a table that goes on below is joined."""
    part = path.read_text().partition("\nAll arms, clean\n")[2].partition("\nTeacher-forced")[0]
    rows: dict[str, str] = {}
    for line in part.splitlines():
        arm, _, cells = line.partition("  ")
        rows[arm] = f"{rows.get(arm, '')}  {cells}  "
    return rows


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row[0])
def test_an_arm_of_the_questions_has_its_raw_figures(row: list[str]) -> None:
    arm, (link,) = re.findall(r"`([^`]+)`", row[0])[0], re.findall(r"\((\S+)\)", row[-1])
    raw = raw_rows(ROOT / "docs" / link)[arm]
    for cell in (each.replace(",", "") for each in row[1:-1] if each):
        assert f"  {cell}  " in raw, cell


@pytest.mark.parametrize("row", MIXTURE, ids=lambda row: row[0])
def test_a_mixture_and_its_dense_twin_have_their_raw_figures(row: list[str]) -> None:
    arm = row[0].replace("`", "").removesuffix(" (control)")
    conditions = (MEASUREMENTS / "quality_mixture_cpu.txt").read_text().split(f"\n{arm}:\n")[1].splitlines()
    names = ("mean KL at its upper bound", "top-1 agreement", "perplexity ratio", "tokens with other experts")
    for name, cell, raw in zip(names, filter(None, row[1:]), conditions, strict=False):
        assert re.match(rf"    {name}.*: \w+, {re.escape(cell)}[ ;]", raw), raw


def test_the_conditions_have_the_default_s_raw_figures() -> None:
    path = MEASUREMENTS / "quality_default_h200.txt"
    text, rows = path.read_text(), raw_rows(path)
    raw, bound = rows["int8"], max(map(float, re.findall(r"^int8 .*, ([\d.]+e-03)\]$", text, re.MULTILINE)))
    figures = dict(
        zip(("loss", "pooled", "flips", "kl", "top_1", "perplexity", "needle", "sample"), CONDITIONS, strict=True)
    )
    shown: dict[str, Any] = {name: row[-1] for name, row in figures.items()}
    for name in ("loss", "pooled", "top_1", "perplexity", "needle"):
        assert f"  {shown[name]}  " in raw, name
    flips, own = (int(re.findall(r"(\d+) of 24500", rows[arm])[0]) for arm in ("int8", "bf16-unfused"))
    assert shown["flips"] == f"{flips} of {2 * own}"
    assert shown["kl"] == f"{bound:.2e}" and "identical to bf16" in raw


def test_the_readme_has_the_raw_figures_of_the_default() -> None:
    text = (ROOT / "README.md").read_text()
    row = next(row for row in QUESTIONS if row[0] == "`int8`: the default")
    served = {re.findall(r"`([^`]+)`", each[0])[0]: each[1] for each in SERVED}
    figures = {row[3], row[4], *row[5].split(" of "), row[6].removeprefix("+"), CONDITIONS[2][2].split(" of ")[1]}
    figures |= {served["bf16"], served["int8-auto"], served["peer-int8"]}
    assert figures <= set(re.findall(r"\d+(?:[.,]\d+)*%?", text))
