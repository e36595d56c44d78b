"""The plot of `sidestream eval`: each arm's KL divergence and its accuracy loss with their intervals, as SVG."""

from collections.abc import Callable, Sequence
from html import escape
from math import floor, log10

from .evaluate import Round
from .verdict import MOST_LOSS, MOST_MEAN_KL, MOST_POOLED_LOSS, ArmResult

NAME, PANEL, GAP, ROW, HEAD, MARGIN = 210, 330, 50, 22, 74, 20
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1c2430 }
.title { font-size: 14px; font-weight: 600 } .small { font-size: 10px; fill: #5b6675 }
.grid { stroke: #e2e8f0 } .limit { stroke: #b4232a; stroke-dasharray: 4 3 } .bar { stroke: #64748b; stroke-width: 1.5 }
.own { fill: #2563eb } .control { fill: #b4232a } .again { fill: #64748b }
"""


def plot(rounds: Sequence[Round]) -> str:
    """SVG text: a row for each arm and round; left the worst adapter's mean KL (logarithmic), right the pooled
    accuracy loss in points.
    """
    rows = [
        (f"{result.arm}{'' if found.label == 'clean' else ' *'}", result)
        for found in rounds
        for result in (found.again, *found.results)
    ]
    width, height = MARGIN * 2 + NAME + 2 * PANEL + GAP, HEAD + ROW * len(rows) + 44
    left, right = MARGIN + NAME, MARGIN + NAME + PANEL + GAP
    kls = [value for _, result in rows for one in result.divergences for value in (one.mean_kl[0],) if value > 0]
    low, high = (floor(log10(max(min(kls), 1e-9))), floor(log10(max(*kls, MOST_MEAN_KL))) + 1) if kls else (-5, 0)
    losses = [
        abs(value)
        for _, result in rows
        if result.pooled is not None and not result.control
        for value in (result.pooled.lower, result.pooled.upper)
    ]
    reach = max([*losses, MOST_LOSS]) * 1.1

    def kl_at(value: float) -> float:
        return left + PANEL * min(max((log10(max(value, 1e-12)) - low) / (high - low), 0.0), 1.0)

    def loss_at(value: float) -> float:
        return right + PANEL * min(max((value + reach) / (2 * reach), 0.0), 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="{left}" y="24">mean KL(bf16 || arm), worst adapter, nats</text>',
        f'<text class="title" x="{right}" y="24">accuracy lost, all adapters, points</text>',
        f'<text class="small" x="{left}" y="40">red: the protocol allows {MOST_MEAN_KL}</text>',
        f'<text class="small" x="{right}" y="40">bars: one-sided 95% bounds; red: the protocol allows '
        f"{MOST_POOLED_LOSS * 100:g}</text>",
    ]
    bottom = HEAD + ROW * len(rows)
    for power in range(low, high + 1):
        parts.append(_rule("grid", kl_at(10.0**power), bottom, f"1e{power}"))
    for share in (-MOST_LOSS, 0.0, MOST_LOSS):
        parts.append(_rule("grid", loss_at(share), bottom, f"{share * 100:+g}"))
    parts += [_rule("limit", kl_at(MOST_MEAN_KL), bottom), _rule("limit", loss_at(MOST_POOLED_LOSS), bottom)]
    for index, (name, result) in enumerate(rows):
        y = HEAD + ROW * index + ROW / 2
        kind = "control" if result.control else "again" if not result.conditions else "own"
        parts.append(f'<text x="{MARGIN}" y="{y + 4:g}"><title>{escape(result.about)}</title>{escape(name)}</text>')
        parts += _marks(result, y, kind, kl_at, loss_at)
    if any(found.label != "clean" for found in rounds):
        others = ", ".join(found.label for found in rounds if found.label != "clean")
        parts.append(f'<text class="small" x="{MARGIN}" y="{height - 10}">* {escape(others)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _marks(
    result: ArmResult, y: float, kind: str, kl_at: Callable[[float], float], loss_at: Callable[[float], float]
) -> list[str]:
    parts = []
    if result.divergences:
        _, low, high = worst = max((one.mean_kl for one in result.divergences), key=lambda value: value[0])
        parts += [_bar(kl_at(low), kl_at(high), y), _dot(kl_at(worst[0]), y, kind)]
    if result.pooled is not None:
        parts += [
            _bar(loss_at(result.pooled.lower), loss_at(result.pooled.upper), y),
            _dot(loss_at(result.pooled.loss), y, kind),
        ]
    return parts


def _rule(kind: str, x: float, bottom: float, label: str = "") -> str:
    line = f'<line class="{kind}" x1="{x:.1f}" y1="{HEAD - 8}" x2="{x:.1f}" y2="{bottom}"/>'
    return line + (
        f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{label}</text>' if label else ""
    )


def _bar(start: float, end: float, y: float) -> str:
    return f'<line class="bar" x1="{start:.1f}" y1="{y:g}" x2="{end:.1f}" y2="{y:g}"/>'


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:g}" r="4"/>'
