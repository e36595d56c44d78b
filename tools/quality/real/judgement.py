"""Which limits the kinds of int8 keep on the real model, next to what bf16 itself has: a verdict, and a table."""

import math
from statistics import mean, stdev
from typing import NamedTuple

from ..arms import DEFAULT, REFERENCE
from ..divergence import Divergence
from ..report import Table
from .measure import Findings

AUTOMATIC, CALIBRATED, ROUNDED = "int8-auto", "int8-calibrated", "int8-calibrated-rounded-values"
JUDGED = (AUTOMATIC, DEFAULT, CALIBRATED, ROUNDED)
PEER_INT8, PEER_FP8 = "peer-int8", "peer-fp8"
BASE = "base"
TITLES = {
    AUTOMATIC: "int8, the default on a GPU, which calibrates itself at its first start",
    DEFAULT: "int8 without a calibration",
    CALIBRATED: "int8 with what `sidestream calibrate` wrote",
    ROUNDED: "int8 with what `sidestream calibrate --round` wrote",
    PEER_INT8: "int8 as other engines serve it",
    PEER_FP8: "fp8 as other engines serve it",
}


class Limit(NamedTuple):
    """A condition on one figure of a Divergence, `field`: at most `bound`, or at least that (`least`)."""

    name: str
    field: str
    bound: float
    form: str
    exact: str
    least: bool = False

    def of(self, one: Divergence) -> float:
        """The figure."""
        estimate: float = getattr(one, self.field)[0]
        return estimate

    def holds(self, one: Divergence) -> bool:
        """Whether the figure keeps the limit."""
        return self.of(one) >= self.bound if self.least else self.of(one) <= self.bound

    def shown(self, one: Divergence) -> str:
        """The figure as text; with more digits where it would read like the limit that it misses."""
        text = self.form.format(self.of(one))
        looks_kept = text == self.form.format(self.bound) and not self.holds(one)
        return self.exact.format(self.of(one)) if looks_kept else text

    @property
    def said(self) -> str:
        """The condition in words."""
        return f"{self.name} of at {'least' if self.least else 'most'} {self.form.format(self.bound)}"


MEAN_KL = Limit("mean KL", "mean_kl", 0.004, "{:.4f}", "{:.6f}")
TOP_1 = Limit("top-1", "top_1", 0.96, "{:.2%}", "{:.4%}", least=True)
PERPLEXITY = Limit("perplexity", "perplexity_ratio", 1.003, "{:.4f}", "{:.6f}")
LIMITS = (MEAN_KL, TOP_1, PERPLEXITY)
NEAR, ENOUGH = 0.01, 20
"""Readings with a smaller mean KL tell how it goes with the perplexity, where there are so many."""


def verdict(found: Findings) -> str:
    """Sentences: what was read; the limits; which of them the default keeps for the base model and for each adapter,
    each figure next to bf16's own; how many the other kinds of int8 keep; eight bits as other engines have them.
    """
    readers = f"the base model and each of {len(found.adapters)} adapters" if found.adapters else "the base model"
    said = [
        f"{found.model}, {found.tokens:,} tokens of natural text for {readers}, compared with transformers in fp32 on "
        f"{found.device}.",
        f"The limits for {'each of them' if found.adapters else 'it'} are "
        f"{_listed([f'a {limit.said}' for limit in LIMITS])} times fp32's; brackets hold what bf16 itself has.",
    ]
    judged = [arm for arm in JUDGED if read(found, arm)]
    said += [_in_full(found, arm) if arm == judged[0] else _in_short(found, arm) for arm in judged]
    said += [f"{TITLES[arm]}:{_of_base(found, arm)}." for arm in (PEER_INT8, PEER_FP8) if _of_base(found, arm)]
    return " ".join(said)


def judgements(found: Findings) -> Table:
    """A row for each kind of int8 of ours and each reader: its figures, bf16's own, and the limits missed."""
    rows = [("arm", "read by", *(name for limit in LIMITS for name in (limit.name, "bf16's")), "misses")]
    for arm in JUDGED:
        for one in read(found, arm):
            own = _own(found, one.adapter)
            pairs = [(limit.shown(one), "" if own is None else limit.shown(own)) for limit in LIMITS]
            figures = [text for pair in pairs for text in pair]
            rows.append((arm, one.adapter, *figures, _missed(one)))
    limits = ", ".join(limit.said for limit in LIMITS)
    note = f"The limits: {limits} times fp32's. The columns `bf16's` hold what bf16 itself has."
    return Table("The limits, and bf16's own distance", rows, left=2, note=note + _what_is_expected(found))


def _what_is_expected(found: Findings) -> str:
    """How the two limits on a mean KL and on a perplexity go together, by all readings that are near bf16."""
    near = [
        (one.mean_kl[0], math.log(one.perplexity_ratio[0]))
        for each in found.arms
        for one in each.divergences
        if one.mean_kl[0] < NEAR
    ]
    if len(near) < ENOUGH:
        return ""
    beyond = [change - mean_kl for mean_kl, change in near]
    return (
        " The mean KL is also how far the logarithm of the perplexity is expected to rise, were the text the model's "
        f"own: over the {len(near)} readings with a mean KL below {NEAR:g} the two differ by {abs(mean(beyond)):.4f} "
        f"on average, with a standard deviation of {stdev(beyond):.4f}. So a reading with a mean KL of "
        f"{MEAN_KL.bound:.4f} is expected to have a perplexity of {math.exp(MEAN_KL.bound):.4f} times fp32's."
    )


def read(found: Findings, arm: str) -> list[Divergence]:
    """What was measured of an arm, for each reader; nothing where it did not run."""
    return [one for each in found.arms if each.arm == arm for one in each.divergences]


def _in_full(found: Findings, arm: str) -> str:
    """Of each that reads which limits the arm keeps: all figures of the base model, of adapters those that miss one."""
    parts = []
    for one in read(found, arm):
        own, base = _own(found, one.adapter), one.adapter == BASE
        kept, missed = (
            _listed([_figure(limit, one, own) for limit in LIMITS if limit.holds(one) == holds])
            for holds in (True, False)
        )
        if not missed:
            says = "keeps all three" + (f", with {kept}" if base else "")
        else:
            says = f"misses {missed}" + (f", and keeps {kept}" if base and kept else "")
        parts.append(f"{'the base model' if base else f'`{one.adapter}`'} {says}")
    return f"{TITLES[arm]}: {'; '.join(parts)}."


def _in_short(found: Findings, arm: str) -> str:
    """How many limits the arm keeps, over all readers."""
    kept = sum(limit.holds(one) for one in read(found, arm) for limit in LIMITS)
    shown = _of_base(found, arm)
    return f"{TITLES[arm]}:{shown}{', and' * bool(shown)} {kept} of {len(read(found, arm)) * len(LIMITS)} limits kept."


def _of_base(found: Findings, arm: str) -> str:
    own = _own(found, BASE)
    return "".join(f" {_figure(MEAN_KL, one, own)}" for one in read(found, arm) if one.adapter == BASE)


def _figure(limit: Limit, one: Divergence, own: Divergence | None) -> str:
    return f"{limit.name} {limit.shown(one)}" + ("" if own is None else f" [{limit.shown(own)}]")


def _missed(one: Divergence) -> str:
    missed = [limit.name for limit in LIMITS if not limit.holds(one)]
    return "all three" if len(missed) == len(LIMITS) else ", ".join(missed) or "none"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _own(found: Findings, adapter: str) -> Divergence | None:
    """What bf16 itself has for the same reader."""
    return next((one for one in read(found, REFERENCE) if one.adapter == adapter), None)
