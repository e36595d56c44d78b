"""The plot of `sidestream eval`: each arm's KL divergence and its accuracy loss with their intervals, as SVG.

The arms that a reader asks for have a row each; the others of a round share one, and controls are told in words.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from .arms import DEFAULT
from .evaluate import Round
from .summary import ARMS
from .verdict import MOST_LOSS, MOST_MEAN_KL, MOST_POOLED_LOSS, ArmResult

NAME, PANEL, GAP, ROW, HEAD, MARGIN = 170, 290, 34, 30, 78, 16
FOLDED = 4  # so many arms besides `ARMS` still have rows of their own
STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
svg { --page: #ffffff; --ink: #1f2328; --muted: #59636e; --line: #d1d9e0; --band: #f3f6f9; --own: #0b5cad }
svg { --limit: #b4232a }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #f0f6fc; --muted: #9198a1; --line: #3d444d; --band: #161c24; --own: #6cb2f7 }
  svg { --limit: #ff8a8f }
}
.title { font-weight: 600 } .small { font-size: 12px; fill: var(--muted) } .default { font-weight: 600 }
.value { font-size: 12px; paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round }
.page { fill: var(--page) } .band { fill: var(--band) } .grid { stroke: var(--line) }
.limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 5 4 } .past { fill: var(--limit) }
.bar { stroke: var(--own); stroke-width: 2 } .dot { fill: var(--own) } .folded { opacity: .55 }
"""


@dataclass(frozen=True)
class _Row:
    """`name` with the results that share the row; none: a heading."""

    name: str
    results: Sequence[ArmResult] = ()


def plot(rounds: Sequence[Round], release: str = "") -> str:
    """SVG text, readable at a width of 830 pixels, light or dark as the reader's system is.

    Left the worst adapter's mean KL (logarithmic), right the pooled accuracy loss in points.
    `release`: the former release whose default the rounds have.
    """
    label = f"{DEFAULT} (default{f' of {release}' if release else ''})"
    rows = [row for found in rounds for row in _rows(found, len(rounds) > 1, label)]
    shown = [result for row in rows for result in row.results]
    width, bottom = MARGIN * 2 + NAME + 2 * PANEL + GAP, HEAD + ROW * len(rows)
    notes = [note for found in rounds if (note := _controls(found))]
    height = bottom + 34 + 18 * len(notes)
    left, right = MARGIN + NAME, MARGIN + NAME + PANEL + GAP
    kls = [value for result in shown for value in _kl(result) if value > 0]
    low, high = floor(log10(min([*kls, MOST_MEAN_KL]))), ceil(log10(max([*kls, MOST_MEAN_KL]) * 1.2))
    losses = [
        abs(end) for result in shown if result.pooled is not None for end in (result.pooled.lower, result.pooled.upper)
    ]
    reach = max([*losses, MOST_LOSS]) * 1.1

    def kl_at(value: float) -> float:
        return left + 12 + (PANEL - 60) * (log10(value) - low) / (high - low) if value > 0 else left

    def loss_at(value: float) -> float:
        return right + PANEL * (value + reach) / (2 * reach)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Mean KL divergence and accuracy loss of each arm"><style>{STYLE}</style>',
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="{left}" y="24">Mean KL to bf16, worst adapter</text>',
        f'<text class="small" x="{left}" y="43">nats; dashed: the most we call identical, {MOST_MEAN_KL}</text>',
        f'<text class="title" x="{right}" y="24">Accuracy lost, all adapters</text>',
        f'<text class="small" x="{right}" y="43">points; bars: 95% bounds; dashed: {MOST_POOLED_LOSS * 100:g}</text>',
    ]
    for index, row in enumerate(rows):
        if not row.results:
            parts.append(f'<rect class="band" x="0" y="{HEAD + ROW * index}" width="{width}" height="{ROW}"/>')
    for power in range(low, high + 1):
        parts.append(_rule("grid", kl_at(10.0**power), bottom, f"{10.0**power:g}"))
    for share in (-MOST_LOSS, 0.0, MOST_LOSS):
        parts.append(_rule("grid", loss_at(share), bottom, f"{share * 100:+g}" if share else "0"))
    parts += [_rule("limit", kl_at(MOST_MEAN_KL), bottom), _rule("limit", loss_at(MOST_POOLED_LOSS), bottom)]
    for index, row in enumerate(rows):
        y = HEAD + ROW * index + ROW / 2
        kind = "title" if not row.results else "default" if row.name.startswith(DEFAULT + " ") else ""
        parts.append(f'<text class="{kind}" x="{MARGIN}" y="{y + 5:g}">{escape(row.name)}</text>')
        for result in row.results:
            parts += _marks(result, y, len(row.results) > 1, kl_at, loss_at)
    parts += [
        f'<text class="small" x="{MARGIN}" y="{bottom + 36 + 18 * place}">{escape(note)}</text>'
        for place, note in enumerate(notes)
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(found: Round, named: bool, default: str) -> Iterator[_Row]:
    """A round's rows: its name if there are several rounds, bf16 again, the arms of `ARMS`, the others."""
    if named:
        yield _Row({"clean": "The model as it is"}.get(found.label, f"With outliers ({found.label})"))
    yield _Row(found.again.arm, [found.again])
    others = [result for result in found.results if not result.control and result.arm not in ARMS]
    own = [result for result in found.results if result.arm in ARMS or (len(others) <= FOLDED and result in others)]
    for result in own:
        yield _Row(default if result.arm == DEFAULT else result.arm, [result])
    if len(others) > FOLDED:
        yield _Row(f"{len(others)} other arms", others)


def _controls(found: Round) -> str:
    """Where the arms with a planted fault lie; "" without any."""
    kls = [value for result in found.results if result.control for value in _kl(result)]
    if not kls:
        return ""
    where = "" if found.label == "clean" else f" ({found.label})"
    return f"Not shown{where}: {len(kls)} control arms with a planted fault, mean KL {min(kls):.2g} to {max(kls):.2g}."


def _kl(result: ArmResult) -> list[float]:
    """The mean KL of the worst adapter, if it was measured."""
    return [max(one.mean_kl[0] for one in result.divergences)] if result.divergences else []


def _marks(
    result: ArmResult, y: float, folded: bool, kl_at: Callable[[float], float], loss_at: Callable[[float], float]
) -> list[str]:
    parts = ['<g class="folded">' if folded else "<g>", f"<title>{escape(f'{result.arm}: {result.about}')}</title>"]
    for value in _kl(result):
        past = " past" if value > MOST_MEAN_KL else ""
        parts.append(f'<circle class="dot" cx="{kl_at(value):.1f}" cy="{y:g}" r="{4 if folded else 5}"/>')
        if not folded:
            parts.append(f'<text class="value{past}" x="{kl_at(value) + 9:.1f}" y="{y + 4:g}">{value:.3g}</text>')
    if result.pooled is not None:
        at, low, high = (loss_at(value) for value in (result.pooled.loss, result.pooled.lower, result.pooled.upper))
        if not folded:
            parts.append(f'<line class="bar" x1="{low:.1f}" y1="{y:g}" x2="{high:.1f}" y2="{y:g}"/>')
        parts.append(f'<circle class="dot" cx="{at:.1f}" cy="{y:g}" r="{4 if folded else 5}"/>')
    return [*parts, "</g>"]


def _rule(kind: str, x: float, bottom: float, label: str = "") -> str:
    line = f'<line class="{kind}" x1="{x:.1f}" y1="{HEAD - 20}" x2="{x:.1f}" y2="{bottom}"/>'
    text = f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>' if label else ""
    return line + text
