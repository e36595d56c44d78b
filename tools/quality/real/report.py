"""What was measured on the real model: one screen, tables, the top of docs/quality.md."""

from collections.abc import Sequence
from math import isnan
from textwrap import fill

from ....compiler.pass_records import WIDTH
from ..arms import DEFAULT, REFERENCE
from ..divergence import Divergence
from ..report import Table
from .judgement import AUTOMATIC, BASE, LIMITS, PEER_FP8, PEER_INT8, Limit, judgements, read, verdict
from .measure import Findings, Measured

OPENING = {
    REFERENCE: "bf16",
    AUTOMATIC: "int8, the default on a GPU (`int8-auto`)",
    DEFAULT: "int8 without a calibration (`int8`)",
    PEER_INT8: "int8 as other engines serve it (`peer-int8`)",
    "peer-fp8-rowwise": "fp8 as other engines serve it, a scale for each row (`peer-fp8-rowwise`)",
    PEER_FP8: "fp8 as other engines serve it, a scale for each tensor (`peer-fp8`)",
}


def screen(found: Findings) -> str:
    """The verdict, then the tables: what a terminal shows at once."""
    return f"{fill(verdict(found), WIDTH)}\n\n{judgements(found).text()}\n{table(found).text()}"


def opening(found: Findings) -> Table:
    """The arms that a reader asks for first: the base model's figures, and those of the worst adapter."""
    rows = [("served as", *(name for limit in LIMITS for name in (limit.name, "worst adapter")))]
    for arm, title in OPENING.items():
        base, others = _parted(read(found, arm))
        if base or others:
            figures = [_worst(limit, some) for limit in LIMITS for some in (base, others)]
            rows.append((title, *figures))
    return Table("A real model", rows)


def table(found: Findings) -> Table:
    """One row for each arm: the base model's figures, and those of the worst adapter."""
    head = ("arm", "mean KL", "adapters", "p99.9 KL", "adapters", "top-1", "adapters", "perplexity", "adapters")
    rows: list[Sequence[str]] = [head, *(_row(each) for each in found.arms)]
    note = (
        f"Each arm next to transformers in fp32, {found.documents} documents. The columns named `adapters` hold the "
        "worst adapter's figure. Mean KL has its 95% interval by bootstrap over documents."
    )
    broken = [f" {each.arm} did not run: {each.problem}." for each in found.arms if each.problem]
    return Table(found.model, rows, note=note + "".join(broken))


def section(found: Findings, picture: str) -> str:
    """The top of docs/quality.md: a table, a picture, a paragraph; then the limits, and every arm with what it is."""
    arms = [f"- `{each.arm}`: {'nothing quantized' if each.arm == REFERENCE else each.about}" for each in found.arms]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    adapters = f" with the adapters {', '.join(found.adapters)}" if found.adapters else ""
    how = (
        f"Measured by `sidestream eval --real`{adapters} in {found.seconds:.0f} s with {versions}. The text is "
        "Python's language reference and licence and sources of its standard library (sha256 of the token ids "
        f"`{found.texts[:16]}`)."
    )
    return "\n".join(
        (
            "## A real model\n",
            _bare(opening(found)),
            f"![Mean KL divergence of each arm to transformers in fp32]({picture})\n",
            verdict(found) + "\n",
            judgements(found).markdown(),
            "### Every arm\n",
            _bare(table(found)),
            *arms,
            "",
            how + "\n",
        )
    )


def _bare(shown: Table) -> str:
    """A table under a heading of the page."""
    return shown.markdown().partition("\n\n")[2]


def _row(each: Measured) -> tuple[str, ...]:
    base, others = _parted(each.divergences)
    kl, top_1, perplexity = LIMITS
    return (
        each.arm,
        "".join(map(_with_interval, base)),
        _worst(kl, others),
        _tail(base),
        _tail(others),
        *(_worst(limit, some) for limit in (top_1, perplexity) for some in (base, others)),
    )


def _parted(divergences: Sequence[Divergence]) -> tuple[list[Divergence], list[Divergence]]:
    """The base model's, and the adapters'."""
    return [one for one in divergences if one.adapter == BASE], [one for one in divergences if one.adapter != BASE]


def _with_interval(one: Divergence) -> str:
    mean, low, high = one.mean_kl
    return f"{mean:.4f}" if isnan(low) else f"{mean:.4f} [{low:.4f}, {high:.4f}]"


def _tail(some: Sequence[Divergence]) -> str:
    known = [one.tail_kl[0] for one in some if not isnan(one.tail_kl[0])]
    return f"{max(known):.3f}" if known else ""


def _worst(limit: Limit, some: Sequence[Divergence]) -> str:
    return limit.form.format((min if limit.least else max)(map(limit.of, some))) if some else ""
