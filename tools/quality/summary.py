"""The top of docs/quality.md: what holds for the default, and the arms that a reader asks for first."""

from collections.abc import Sequence
from textwrap import fill

from ...compiler.pass_records import WIDTH
from .arms import DEFAULT
from .evaluate import Round
from .report import Table
from .verdict import MOST_FLIPS, ArmResult, noise_of

ARMS = ("bf16-unfused", DEFAULT, "fp8", "fp8-tensorwise")


def summary(found: Round, release: str = "") -> str:
    """A paragraph and a table in Markdown; "" for a round without the default arm. `release`: whose default that is."""
    said = _sentences(found, release)
    return "\n".join((said, "", _table(found).markdown().partition("\n\n")[2])) if said else ""


def screen(found: Round) -> str:
    """The same for a terminal; without the default arm the table alone."""
    return "\n\n".join(part for part in (fill(_sentences(found), WIDTH), _table(found).text()) if part)


def _sentences(found: Round, release: str = "") -> str:
    """What holds for the default; "" where it was not measured."""
    default = next((result for result in found.results if result.arm == DEFAULT), None)
    if default is None or not default.conditions:
        return ""
    missed = [condition.name for condition in default.conditions if condition.state != "met"]
    sentences = [
        f"The default{f' of {release}' if release else ''} (`{DEFAULT}`) meets "
        f"{len(default.conditions) - len(missed)} of the {len(default.conditions)} "
        f'conditions for "identical to bf16" that are listed below.'
    ]
    if missed:
        sentences.append(f"It does not meet: {', '.join(missed)}.")
    (own, whose), flips = noise_of(found.results, found.again.pooled), default.pooled
    if own is not None and flips is not None and own.items == flips.items:
        sentences.append(
            f"{flips.flips:,} of {flips.items:,} answers change between right and wrong; our limit is "
            f"{MOST_FLIPS * own.flips:g}, which is {MOST_FLIPS:g} times the {own.flips:,} of "
            f"{whose}."
        )
    return " ".join(sentences)


def _table(found: Round) -> Table:
    rows: list[Sequence[str]] = [
        ("arm", "mean KL", "top-1", "bf16 right", "right", "flips", "loss at most", "verdict"),
        _row(found.again, ""),
        *(_row(result, result.verdict) for result in found.results if result.arm in ARMS),
    ]
    note = (
        "Mean KL, top-1 and `loss at most` (one-sided 95%, in points of accuracy) are those of the worst adapter; the "
        "other figures are those of all adapters. A flip is an answer that changes between right and wrong. "
        "`bf16 again` is bf16 at another load, `bf16-unfused` rounds where PyTorch's own modules do, `fp8` is e4m3 "
        "with one scale for each row, and `fp8-tensorwise` e4m3 with one scale for each tensor."
    )
    return Table("In short", rows, note=note)


def _row(result: ArmResult, verdict: str) -> tuple[str, ...]:
    each, pooled = result.divergences, result.pooled
    read = (
        ("", "")
        if not each
        else (f"{max(one.mean_kl[0] for one in each):.2e}", f"{min(one.top_1[0] for one in each):.2%}")
    )
    asked = (
        ("",) * 4
        if pooled is None
        else (
            f"{pooled.reference:.1%}",
            f"{pooled.arm:.1%}",
            f"{pooled.flips:,} of {pooled.items:,}",
            f"{max(one.upper for one in result.accuracies) * 100:+.2f}",
        )
    )
    return (result.arm, *read, *asked, verdict)
