"""The tables of `sidestream eval`: as text for the screen, as Markdown for the page, as plain values for JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

import msgspec

from ...compiler.pass_records import WIDTH, columns
from .divergence import ALL, Divergence, Estimate
from .evaluate import Round
from .exact import Accuracy
from .statistics import loss_bounds
from .teacher_forced import KINDS
from .verdict import ArmResult, Condition, judge


@dataclass(frozen=True)
class Table:
    """A table: the first row names the columns; all columns but the first `left` are flush right."""

    title: str
    rows: Sequence[Sequence[str]]
    left: int = 1
    note: str = ""

    def text(self) -> str:
        """For the screen."""
        body = columns(self.rows, range(self.left, len(self.rows[0])), WIDTH, keys=self.left)
        return f"{self.title}\n\n{body}" + (f"\n{fill(self.note, WIDTH)}\n" if self.note else "")

    def markdown(self) -> str:
        """For the page."""
        lines = [f"### {self.title}", ""]
        for index, row in enumerate(self.rows):
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
            if index == 0:
                lines.append(f"| {' | '.join('---' if place < self.left else '---:' for place in range(len(row)))} |")
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


def tables(found: Round) -> list[Table]:
    """All tables of a round; those of which nothing was measured are left out."""
    return [
        table
        for table in (_overview(found), _divergences(found), _shares(found), _accuracies(found), *_needles(found))
        if len(table.rows) > 1
    ]


def verdicts(found: Round, markdown: bool = False) -> str:
    """For each arm what may be said of it; the claim only where every condition holds, else each condition that does
    not, with its figure.
    """
    lines = []
    for result in found.results:
        name = f"**{result.arm}**" if markdown else result.arm
        if result.control:
            lines.append(f"{name}: {_caught(found, result)} ({result.about})")
        else:
            lines.append(f"{name}: {result.verdict} ({result.about})")
        lines += [
            f"{'- ' if markdown else '    '}{_condition(condition)}"
            for condition in result.conditions
            if condition.state != "met"
        ]
        lines += [""] if markdown else []
    lines += [f"{name}: did not run: {problem}" for name, problem in found.errors.items()]
    shown = lines if markdown else [fill(line, WIDTH, subsequent_indent=" " * 8) for line in lines]
    return "\n".join(shown) + "\n"


def _caught(found: Round, result: ArmResult) -> str:
    """Whether a control was caught, and how."""
    if result.failed:
        return "fails, as it must"
    apart = found.apart(result)
    if apart:
        return f"misses no condition here, but is told apart from the default: {apart}"
    return "NOT SEEN: the measurement does not tell this fault from the default"


def as_json(rounds: Sequence[Round], about: dict[str, Any]) -> dict[str, Any]:
    """Plain values: everything that the tables show, and `about`."""
    return {
        **about,
        "rounds": [
            {
                "label": found.label,
                "sound": found.sound,
                "errors": found.errors,
                "again": asdict(found.again),
                "arms": [_result(result) for result in found.results],
            }
            for found in rounds
        ],
    }


def rounds_of(values: dict[str, Any]) -> list[Round]:
    """The rounds that `as_json` wrote, judged by today's protocol."""
    rounds = [msgspec.convert({**each, "results": each["arms"]}, Round) for each in values["rounds"]]
    for found in rounds:
        judge(found.results, found.again.pooled)
    return rounds


def _result(result: ArmResult) -> dict[str, Any]:
    return {**asdict(result), "identical": result.identical, "failed": result.failed, "verdict": result.verdict}


def _overview(found: Round) -> Table:
    head = (
        "arm",
        "mean KL",
        "p99.9 KL",
        "top-1",
        "top-1, all",
        "perplexity",
        "bf16 right",
        "right",
        "flips",
        "loss at most",
        "pooled",
        "needle",
        "verdict",
    )
    rows = [head, _line(found.again, "")]
    for result in found.results:
        seen = "fails" if result.failed else "NOT SEEN" if result.arm in found.missed_controls else "apart"
        rows.append(_line(result, seen if result.control else result.verdict))
    note = (
        "Teacher-forced figures and `loss at most` (one-sided 95%) are those of the worst adapter; `top-1, all` "
        "counts what the tasks have drawn at random "
        "too; `needle` is the largest difference to bf16 at any length and depth."
    )
    return Table(f"All arms, {found.label}", rows, note=note)


def _line(result: ArmResult, verdict: str) -> tuple[str, ...]:
    each, pooled = result.divergences, result.pooled
    over_all = [one.shares[ALL].top_1 for one in each if ALL in one.shares]
    teacher = (
        ("",) * 5
        if not each
        else (
            f"{max(one.mean_kl[0] for one in each):.2e}",
            f"{max(one.tail_kl[0] for one in each):.2e}",
            f"{min(one.top_1[0] for one in each):.2%}",
            f"{min(over_all):.2%}" if over_all else "",
            f"{max(one.perplexity_ratio[0] for one in each):.4f}",
        )
    )
    asked = (
        ("",) * 5
        if pooled is None
        else (
            f"{pooled.reference:.1%}",
            f"{pooled.arm:.1%}",
            f"{pooled.flips} of {pooled.items}",
            f"{max(one.upper for one in result.accuracies) * 100:+.2f}",
            f"{pooled.upper * 100:+.2f}",
        )
    )
    worst = max(result.needles, key=lambda one: abs(one.reference - one.arm), default=None)
    return (
        result.arm,
        *teacher,
        *asked,
        "" if worst is None else f"{(worst.arm - worst.reference) * 100:+.1f}",
        verdict,
    )


def _divergences(found: Round) -> Table:
    rows: list[Sequence[str]] = [
        (
            "arm",
            "adapter",
            "documents",
            "tokens",
            "mean KL [95%]",
            "p99.9 KL [95%]",
            "top-1 [95%]",
            "perplexity ratio [95%]",
        )
    ]
    for result in (found.again, *found.results):
        rows += [_divergence(result.arm, one) for one in result.divergences]
    note = (
        "KL(bf16 || arm) in nats a token; intervals by bootstrap over documents. `tokens` are those that count: "
        "ordinary text, and answers with their end. "
        "Tokens that a task has drawn at random are read and not counted here: the next table has them."
    )
    return Table(f"Teacher-forced, {found.label}", rows, left=2, note=note)


def _shares(found: Round) -> Table:
    head = [f"{figure}, {kind}" for kind in KINDS for figure in ("tokens", "mean KL", "top-1")]
    rows: list[Sequence[str]] = [
        ("arm", "adapter", *head, "tokens, all", "mean KL, all", "top-1, all", "perplexity, all")
    ]
    for result in (found.again, *found.results):
        for one in result.divergences:
            if set(one.shares) - {KINDS[0], ALL}:  # where nothing but text was read the table above says it all
                rows.append(
                    (
                        result.arm,
                        one.adapter,
                        *(cell for kind in KINDS for cell in _share(one, kind)),
                        *_share(one, ALL),
                        f"{one.shares[ALL].perplexity_ratio:.4f}",
                    )
                )
    note = (
        "`drawn`: what a task draws at random, so that no model can predict it: the operands, letters and names of its "
        "questions, and the lines that state codes. "
        "There many tokens are about equally likely. Which of them comes first is chance, so top-1 says little; the KL "
        "says how far the arm is from bf16."
    )
    return Table(f"Teacher-forced by what is to be predicted, {found.label}", rows, left=2, note=note)


def _share(one: Divergence, kind: str) -> tuple[str, str, str]:
    if kind not in one.shares:
        return "", "", ""
    share = one.shares[kind]
    return f"{share.tokens:,}", f"{share.mean_kl:.2e}", f"{share.top_1:.2%}"


def _divergence(arm: str, one: Divergence) -> tuple[str, ...]:
    figures = (
        _estimate(one.mean_kl, "{:.2e}"),
        _estimate(one.tail_kl, "{:.2e}"),
        _estimate(one.top_1, "{:.2%}"),
        _estimate(one.perplexity_ratio, "{:.4f}"),
    )
    return (arm, one.adapter, f"{one.documents:,}", f"{one.tokens:,}", *figures)


def _estimate(value: Estimate, form: str) -> str:
    return f"{form.format(value[0])} [{form.format(value[1])}, {form.format(value[2])}]"


def _accuracies(found: Round) -> Table:
    rows: list[Sequence[str]] = [
        (
            "arm",
            "adapter",
            "items",
            "bf16 right",
            "right",
            "lost",
            "won",
            "texts changed",
            "McNemar p",
            "loss",
            "at most (95%)",
        )
    ]
    for result in (found.again, *found.results):
        rows += [
            _accuracy(result.arm, one)
            for one in (*result.accuracies, *([] if result.pooled is None else [result.pooled]))
        ]
    note = "`lost`: right in bf16 and wrong here; `won`: the other way round. Losses in points of accuracy."
    return Table(f"Questions with exact answers, {found.label}", rows, left=2, note=note)


def _accuracy(arm: str, one: Accuracy) -> tuple[str, ...]:
    shares = f"{one.reference:.2%}", f"{one.arm:.2%}", str(one.worse), str(one.better), str(one.changed)
    return (
        arm,
        one.adapter,
        f"{one.items:,}",
        *shares,
        f"{one.p:.3f}",
        f"{one.loss * 100:+.2f}",
        f"{one.upper * 100:+.2f}",
    )


def _needles(found: Round) -> list[Table]:
    if not found.again.needles:
        return []
    depths = sorted({one.depth for one in found.again.needles})
    lengths = sorted({one.length for one in found.again.needles})
    reference = {(one.length, one.depth): one for one in found.again.needles}
    rows = [("tokens", *(f"depth {depth:g}" for depth in depths))]
    rows += [
        (
            f"{length:,}",
            *(f"{reference[length, depth].reference:.0%}" if (length, depth) in reference else "" for depth in depths),
        )
        for length in lengths
    ]
    items = max(one.items for one in found.again.needles)
    all_rows = [("arm", *(f"{length:,}" for length in lengths), "items", "lost", "won", "loss at most")]
    for result in (found.again, *found.results):
        cells = []
        for length in lengths:
            at = [one for one in result.needles if one.length == length]
            cells.append(
                " ".join(f"{(one.arm - one.reference) * 100:+.0f}" for one in sorted(at, key=lambda one: one.depth))
            )
        sums = [sum(getattr(one, name) for one in result.needles) for name in ("items", "worse", "better")]
        all_rows.append(
            (
                result.arm,
                *cells,
                *map(str, sums),
                f"{loss_bounds(sums[1], sums[2], sums[0])[1] * 100:+.2f}" if sums[0] else "",
            )
        )
    note = (
        f"Points of difference to bf16 at depths {', '.join(f'{depth:g}' for depth in depths)}; {items} needles of "
        "each length and depth, fewer for arms "
        "that are asked a part. `lost`: found by bf16 alone; `won`: by the arm alone; the bound (one-sided 95%) is "
        "of all together."
    )
    return [
        Table(f"Needles found by bf16, {found.label}", rows),
        Table(f"Needles: difference to bf16 by length, {found.label}", all_rows, note=note),
    ]


def _condition(condition: Condition) -> str:
    return (
        f"{condition.name}: {condition.state}{f', {condition.figure}' if condition.figure else ''}; the condition is "
        f"{condition.limit}"
    )
