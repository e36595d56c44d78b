"""Tables of `sidestream eval` for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from ...compiler.pass_records import WIDTH, columns
from .answers import Accuracy
from .divergence import Divergence, Estimate
from .evaluate import ArmResult, Evaluation


@dataclass(frozen=True)
class Table:
    """A table; the first row has the column names, and columns after the first `left` are aligned to the right."""

    title: str
    rows: Sequence[Sequence[str]]
    left: int = 1
    note: str = ""

    def text(self) -> str:
        """Return the table in at most WIDTH columns."""
        body = columns(self.rows, range(self.left, len(self.rows[0])), WIDTH, keys=self.left)
        return f"{self.title}\n\n{body}" + (f"\n{fill(self.note, WIDTH)}\n" if self.note else "")


def report(found: Evaluation) -> str:
    """Return all tables that have rows, and the arms that did not run."""
    tables = (_overview(found), _divergences(found), _accuracies(found))
    shown = [table.text() for table in tables if len(table.rows) > 1]
    shown += [f"{name} did not run: {problem}" for name, problem in found.errors.items()]
    return "\n".join(shown)


def _overview(found: Evaluation) -> Table:
    head = ("arm", "mean KL", "p99.9 KL", "top-1", "perplexity", "bf16 right", "right", "flips", "loss at most")
    note = (
        "Teacher-forced figures and `loss at most` (one-sided 95%, in points of accuracy) are those of the worst "
        "adapter. A flip is an answer that changes between right and wrong."
    )
    return Table("All arms", [head, *map(_overview_row, (found.again, *found.results))], note=note)


def _overview_row(result: ArmResult) -> tuple[str, ...]:
    each, pooled = result.divergences, result.pooled
    read: tuple[str, ...] = ("",) * 4
    if each:
        read = (
            f"{max(one.mean_kl[0] for one in each):.2e}",
            f"{max(one.tail_kl[0] for one in each):.2e}",
            f"{min(one.top_1[0] for one in each):.2%}",
            f"{max(one.perplexity_ratio[0] for one in each):.4f}",
        )
    asked: tuple[str, ...] = ("",) * 4
    if pooled is not None:
        asked = (
            f"{pooled.reference:.1%}",
            f"{pooled.arm:.1%}",
            f"{pooled.flips} of {pooled.items}",
            f"{max(one.upper for one in result.accuracies) * 100:+.2f}",
        )
    return (result.arm, *read, *asked)


def _divergences(found: Evaluation) -> Table:
    rows: list[Sequence[str]] = [
        ("arm", "adapter", "documents", "tokens", "mean KL [95%]", "p99.9 KL [95%]", "top-1 [95%]", "perplexity [95%]")
    ]
    for result in (found.again, *found.results):
        rows += [_divergence_row(result.arm, one) for one in result.divergences]
    note = "KL(bf16 || arm) in nats per token; perplexity as a ratio to bf16's; intervals by bootstrap over documents."
    return Table("Documents", rows, left=2, note=note)


def _divergence_row(arm: str, one: Divergence) -> tuple[str, ...]:
    figures = (one.mean_kl, "{:.2e}"), (one.tail_kl, "{:.2e}"), (one.top_1, "{:.2%}"), (one.perplexity_ratio, "{:.4f}")
    estimates = (_estimate(value, form) for value, form in figures)
    return (arm, one.adapter, f"{one.documents:,}", f"{one.tokens:,}", *estimates)


def _estimate(value: Estimate, form: str) -> str:
    return f"{form.format(value[0])} [{form.format(value[1])}, {form.format(value[2])}]"


def _accuracies(found: Evaluation) -> Table:
    head = ("arm", "adapter", "items", "bf16 right", "right", "lost", "won", "changed", "p", "loss", "at most")
    rows: list[Sequence[str]] = [head]
    for result in (found.again, *found.results):
        every = (*result.accuracies, *([] if result.pooled is None else [result.pooled]))
        rows += [_accuracy_row(result.arm, one) for one in every]
    note = (
        "`lost`: right in bf16 and wrong here; `won`: vice versa; `changed`: another text; `p`: McNemar's exact test; "
        "losses in points of accuracy, `at most` with 95% confidence."
    )
    return Table("Questions", rows, left=2, note=note)


def _accuracy_row(arm: str, one: Accuracy) -> tuple[str, ...]:
    shares = f"{one.reference:.2%}", f"{one.arm:.2%}", str(one.worse), str(one.better), str(one.changed)
    losses = f"{one.p:.3f}", f"{one.loss * 100:+.2f}", f"{one.upper * 100:+.2f}"
    return (arm, one.adapter, f"{one.items:,}", *shares, *losses)
