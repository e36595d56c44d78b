"""Limits on the figures of the real model, and its tables for the terminal."""

from collections.abc import Sequence
from math import isnan
from textwrap import fill
from typing import NamedTuple

from ....compiler.pass_records import WIDTH
from ..arms import AUTOMATIC, CALIBRATED, DEFAULT, REFERENCE, ROUNDED
from ..divergence import Divergence
from ..report import Table
from .measure import ArmFigures, Findings

JUDGED = (AUTOMATIC, DEFAULT, CALIBRATED, ROUNDED)
BASE = "base"


class Limit(NamedTuple):
    """A condition on one field of a Divergence: at most `bound`, or at least (`least`)."""

    name: str
    field: str
    bound: float
    form: str
    exact: str
    least: bool = False

    def value(self, one: Divergence) -> float:
        """Return the figure."""
        estimate: float = getattr(one, self.field)[0]
        return estimate

    def holds(self, one: Divergence) -> bool:
        """Return whether the figure keeps the limit."""
        return self.value(one) >= self.bound if self.least else self.value(one) <= self.bound

    def text(self, one: Divergence) -> str:
        """Return the figure, with more digits if it would round to the limit that it misses."""
        text = self.form.format(self.value(one))
        rounds_to_bound = text == self.form.format(self.bound) and not self.holds(one)
        return self.exact.format(self.value(one)) if rounds_to_bound else text

    @property
    def condition(self) -> str:
        """Return the condition in words."""
        return f"{self.name} of at {'least' if self.least else 'most'} {self.form.format(self.bound)}"


MEAN_KL = Limit("mean KL", "mean_kl", 0.004, "{:.4f}", "{:.6f}")
TOP_1 = Limit("top-1", "top_1", 0.96, "{:.2%}", "{:.4%}", least=True)
PERPLEXITY = Limit("perplexity", "perplexity_ratio", 1.003, "{:.4f}", "{:.6f}")
LIMITS = (MEAN_KL, TOP_1, PERPLEXITY)


def report(found: Findings) -> str:
    """Return a heading and both tables."""
    readers = f"the base model and each of {len(found.adapters)} adapters" if found.adapters else "the base model"
    heading = (
        f"{found.model}, {found.tokens:,} tokens of natural text for {readers}, compared with transformers in fp32 on "
        f"{found.device}."
    )
    return f"{fill(heading, WIDTH)}\n\n{limits_table(found).text()}\n{arms_table(found).text()}"


def limits_table(found: Findings) -> Table:
    """Return a row for each int8 arm and adapter: its figures, those of bf16, and the limits that it misses."""
    rows = [("arm", "read by", *(name for limit in LIMITS for name in (limit.name, "of bf16")), "misses")]
    for arm in JUDGED:
        for one in figures_of(found, arm):
            own = next((each for each in figures_of(found, REFERENCE) if each.adapter == one.adapter), None)
            pairs = [(limit.text(one), "" if own is None else limit.text(own)) for limit in LIMITS]
            rows.append((arm, one.adapter, *(text for pair in pairs for text in pair), _missed(one)))
    conditions = ", ".join(limit.condition for limit in LIMITS)
    return Table("Limits", rows, left=2, note=f"The limits: {conditions} times that of fp32.")


def arms_table(found: Findings) -> Table:
    """Return one row for each arm: the base model's figures, and those of the worst adapter."""
    head = ("arm", "mean KL", "adapters", "p99.9 KL", "adapters", "top-1", "adapters", "perplexity", "adapters")
    rows: list[Sequence[str]] = [head, *map(_arm_row, found.arms)]
    note = (
        f"Each arm next to transformers in fp32, {found.documents} documents. The columns `adapters` have the figure "
        "of the worst adapter. Mean KL has its 95% interval by bootstrap over documents."
    )
    broken = [f" {each.arm} did not run: {each.problem}." for each in found.arms if each.problem]
    return Table("All arms", rows, note=note + "".join(broken))


def figures_of(found: Findings, arm: str) -> list[Divergence]:
    """Return the figures of an arm; none if it did not run."""
    return [one for each in found.arms if each.arm == arm for one in each.divergences]


def _arm_row(each: ArmFigures) -> tuple[str, ...]:
    base = [one for one in each.divergences if one.adapter == BASE]
    others = [one for one in each.divergences if one.adapter != BASE]
    kl, *limits = LIMITS
    return (
        each.arm,
        "".join(map(_with_interval, base)),
        _worst(kl, others),
        _tail(base),
        _tail(others),
        *(_worst(limit, some) for limit in limits for some in (base, others)),
    )


def _with_interval(one: Divergence) -> str:
    mean, low, high = one.mean_kl
    return f"{mean:.4f}" if isnan(low) else f"{mean:.4f} [{low:.4f}, {high:.4f}]"


def _tail(some: Sequence[Divergence]) -> str:
    known = [one.tail_kl[0] for one in some if not isnan(one.tail_kl[0])]
    return f"{max(known):.3f}" if known else ""


def _worst(limit: Limit, some: Sequence[Divergence]) -> str:
    return limit.form.format((min if limit.least else max)(map(limit.value, some))) if some else ""


def _missed(one: Divergence) -> str:
    return ", ".join(limit.name for limit in LIMITS if not limit.holds(one)) or "none"
