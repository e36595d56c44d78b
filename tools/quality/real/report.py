"""What was measured on the real model: a verdict of one screen, its table, the top of docs/quality.md."""

from collections.abc import Sequence
from textwrap import fill

from ....compiler.records import WIDTH
from ..arms import DEFAULT, REFERENCE
from ..divergence import Divergence
from ..report import Table
from .measure import Findings, Measured

MOST_MEAN_KL, LEAST_TOP_1, MOST_PERPLEXITY_RATIO = 0.004, 0.96, 1.003
AUTOMATIC, CALIBRATED, ROUNDED = "int8-auto", "int8-calibrated", "int8-calibrated-rounded-values"
PEERS = ("peer-fp8", "peer-int8")
BASE = "base"


def screen(found: Findings) -> str:
    """The verdict, then the table: what a terminal shows at once."""
    return f"{fill(verdict(found), WIDTH)}\n\n{table(found).text()}"


def verdict(found: Findings) -> str:
    """Sentences about bf16 itself, the default, what calibration makes of it, and eight bits as other engines have
    them: the base model's figures.
    """
    readers = f"the base model and each of {len(found.adapters)} adapters" if found.adapters else "the base model"
    said = [
        f"{found.model}, {found.tokens:,} tokens of natural text for {readers}, compared with transformers in fp32 on "
        f"{found.device}."
    ]
    for arm in (REFERENCE, AUTOMATIC, DEFAULT, CALIBRATED, ROUNDED, *PEERS):
        one = _base(found, arm)
        if one is not None:
            judged = "" if arm == REFERENCE or arm in PEERS else _judged(one)
            said.append(f"{_title(arm)}: {_figures(one)}{judged}.")
    return " ".join(said)


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


def section(found: Findings, picture: str, later: str = "") -> str:
    """The top of docs/quality.md: a paragraph, what was measured `later`, the table, the picture, and what each arm
    is.
    """
    shown = table(found).markdown().partition("\n\n")[2]
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
            verdict(found) + "\n",
            *([later] if later else []),
            shown,
            f"![Mean KL divergence of each arm to transformers in fp32]({picture})\n",
            *arms,
            "",
            how + "\n",
        )
    )


def _title(arm: str) -> str:
    return {
        REFERENCE: "bf16 itself",
        AUTOMATIC: "int8, the default on a GPU, which calibrates itself at its first start",
        DEFAULT: "int8 without a calibration",
        CALIBRATED: "int8 with what `sidestream calibrate` wrote",
        ROUNDED: "int8 with what `sidestream calibrate --round` wrote",
        "peer-fp8": "fp8 as other engines serve it",
        "peer-int8": "int8 as other engines serve it",
    }[arm]


def _figures(one: Divergence) -> str:
    return (
        f"mean KL {one.mean_kl[0]:.4f}, top-1 agreement {one.top_1[0]:.1%}, perplexity ratio "
        f"{one.perplexity_ratio[0]:.4f}"
    )


def _judged(one: Divergence) -> str:
    """Which of the three limits the figures miss."""
    missed = [
        text
        for text, met in (
            (f"mean KL of at most {MOST_MEAN_KL:.4f}", one.mean_kl[0] <= MOST_MEAN_KL),
            (f"top-1 of at least {LEAST_TOP_1:.0%}", one.top_1[0] >= LEAST_TOP_1),
            (f"perplexity ratio of at most {MOST_PERPLEXITY_RATIO}", one.perplexity_ratio[0] <= MOST_PERPLEXITY_RATIO),
        )
        if not met
    ]
    return f" (misses our limits: {', '.join(missed)})" if missed else " (within our limits)"


def _base(found: Findings, arm: str) -> Divergence | None:
    return next(
        (one for each in found.arms if each.arm == arm for one in each.divergences if one.adapter == BASE), None
    )


def _row(each: Measured) -> tuple[str, ...]:
    base = [one for one in each.divergences if one.adapter == BASE]
    others = [one for one in each.divergences if one.adapter != BASE]
    kl = "".join(f"{one.mean_kl[0]:.4f} [{one.mean_kl[1]:.4f}, {one.mean_kl[2]:.4f}]" for one in base)
    return (
        each.arm,
        kl,
        _worst([one.mean_kl[0] for one in others], "{:.4f}"),
        _worst([one.tail_kl[0] for one in base], "{:.3f}"),
        _worst([one.tail_kl[0] for one in others], "{:.3f}"),
        _worst([one.top_1[0] for one in base], "{:.2%}", least=True),
        _worst([one.top_1[0] for one in others], "{:.2%}", least=True),
        _worst([one.perplexity_ratio[0] for one in base], "{:.4f}"),
        _worst([one.perplexity_ratio[0] for one in others], "{:.4f}"),
    )


def _worst(values: Sequence[float], form: str, least: bool = False) -> str:
    return form.format((min if least else max)(values)) if values else ""
