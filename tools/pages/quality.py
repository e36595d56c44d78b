"""Keeps docs/quality.md and its pictures true: makes them from the raw output in docs/measurements.

python -m sidestream.tools.pages.quality            exit code 1 and a diff when they are not what was measured
python -m sidestream.tools.pages.quality --write    write them
"""

import json
import re
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

import msgspec

from ..quality.arms import BY_NAME, DEFAULT
from ..quality.divergence import Divergence, Estimate
from ..quality.page import page
from ..quality.plot import plot
from ..quality.real.judgement import AUTOMATIC, read
from ..quality.real.measure import ARMS as REAL_ARMS
from ..quality.real.measure import Findings, Measured
from ..quality.real.picture import picture as real_picture
from ..quality.real.report import section
from ..quality.report import rounds_of
from .excerpts import keep_pages

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE, REAL_PICTURE = DOCS / "quality.md", DOCS / "quality.svg", DOCS / "real_model.svg"
REAL, LATER = "real_model_h200.json", "real_model_auto_h200.txt"
# a line that `sidestream eval --real` prints of an arm, and in it the base model's or an adapter's figures
ARM = re.compile(r"^ *[0-9.]+ s  (\S+): (base KL .*)$", re.MULTILINE)
FIGURES = re.compile(r"(\S+) KL ([0-9.]+), top-1 ([0-9.]+)%, perplexity ([0-9.]+)")
LATER_SAYS = """\
{} are newer than the other rows. They were measured in the same way with the same adapters, in a run of
which only the lines printed by then are known ([{}](measurements/{})). Their figures are rounded as they stand
here, and so judged; one that stands at a limit may miss it by less than its last digit. Intervals and the 99.9th
percentile are not known.
"""
MODELS = """\
`python -m sidestream.tools.quality.train` makes the models with its defaults (base `a443dc3361f6d6b4`,
`measurements/eval_models_h200.txt`). It adds up in one order: runs on the same kind of GPU and with the same
releases write the same bits, here on three machines. The arms ran on four GPUs at once. Each adapter answers 60 to
90% of its questions right. The arithmetic adapter's recipe is a gentle one, chosen for how well it still predicts
ordinary text: an adapter that reads nothing but digits forgets text soonest, and its first choices there are then
coin tosses (with twice the steps and four times the scale top-1 agreement was 96.50%).

In all these arms norms are rotated by 8 columns. With 64, the default since, the same models on one H200 had a mean KL
of 1.79e-03, top-1 agreement of 97.29%, a loss of at most 0.32 points, and 170 of 24,500 answers that change, where
`bf16-unfused` had 125: identical to bf16 (`measurements/quality_rotated_64_h200.txt`). No outliers were put in there.
"""


def measured(_: str = "") -> str:
    """The page as the raw output has it."""
    about = _raw()
    return page(rounds_of(about), about, PICTURE, PAGE, MODELS, top(real_findings()))


def top(found: Findings, lines: str | None = None) -> str:
    """What the page says of the real model; `lines`: see `with_later`."""
    full, newer = with_later(found, lines)
    names = " and ".join(f"`{name}`" for name in newer)
    return section(full, REAL_PICTURE.name, LATER_SAYS.format(names, LATER, LATER) if newer else "")


def with_later(found: Findings, lines: str | None = None) -> tuple[Findings, list[str]]:
    """The same with the arms that only `lines` (default: those of LATER) know, after the default without a calibration;
    and their names.

    Without the default on a GPU a measurement is from before it; one that has it needs no lines.
    """
    if read(found, AUTOMATIC):
        return found, []
    lines = (DOCS / "measurements" / LATER).read_text(encoding="utf-8") if lines is None else lines
    known = {each.arm for each in found.arms}
    printed = {arm: line for arm, line in ARM.findall(lines) if arm not in known}
    newer = [Measured(arm, BY_NAME[arm].about, _divergences(printed[arm])) for arm in REAL_ARMS if arm in printed]
    place = next((at for at, each in enumerate(found.arms, 1) if each.arm == DEFAULT), len(found.arms))
    arms = [*found.arms[:place], *newer, *found.arms[place:]]
    return msgspec.structs.replace(found, arms=arms), [each.arm for each in newer]


def _divergences(line: str) -> list[Divergence]:
    """The figures of a printed line; what it does not say is not a number."""

    def estimate(value: float) -> Estimate:
        return value, nan, nan

    return [
        Divergence(adapter, 0, 0, estimate(float(kl)), (nan,) * 3, estimate(float(top_1) / 100), estimate(float(ratio)))
        for adapter, kl, top_1, ratio in FIGURES.findall(line)
    ]


def picture(_: str = "") -> str:
    """The picture as the raw output has it."""
    return plot(rounds_of(_raw()))


def picture_of_the_real_model(_: str = "") -> str:
    """The same for the real model."""
    return real_picture(with_later(real_findings())[0])


def real_findings() -> Findings:
    """What was measured on the real model."""
    return msgspec.json.decode((DOCS / "measurements" / REAL).read_bytes(), type=Findings)


def _raw() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "measurements" / "quality_h200.json").read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    pages = {PAGE: measured, PICTURE: picture, REAL_PICTURE: picture_of_the_real_model}
    return keep_pages("python -m sidestream.tools.pages.quality", str(__doc__), pages, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
