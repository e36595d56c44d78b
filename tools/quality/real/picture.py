"""The picture of the real model's arms: each one's mean KL to transformers in fp32, as SVG."""

from html import escape
from math import ceil, floor, log10

from ..arms import DEFAULT
from ..plot import STYLE
from .judgement import AUTOMATIC, BASE, MEAN_KL, read
from .measure import Findings

NAME, PANEL, ROW, HEAD, MARGIN = 236, 500, 28, 66, 16


def picture(found: Findings) -> str:
    """SVG text, readable at a width of 830 pixels: a full dot for the base model, an open one for each adapter."""
    shown = [each for each in found.arms if each.divergences]
    default = AUTOMATIC if read(found, AUTOMATIC) else DEFAULT
    kls = [max(one.mean_kl[0], 1e-9) for each in shown for one in each.divergences]
    low, high = floor(log10(min([*kls, MEAN_KL.bound]))), ceil(log10(max([*kls, MEAN_KL.bound]) * 1.2))
    left, bottom = MARGIN + NAME, HEAD + ROW * len(shown)
    width, height = left + PANEL + MARGIN, bottom + 30

    def at(value: float) -> float:
        return left + 12 + (PANEL - 80) * (log10(max(value, 1e-9)) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Mean KL of each arm to fp32, {escape(found.model)}"><style>{STYLE}'
        ".open { fill: none; stroke: var(--own); opacity: .6 }</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN}" y="24">Mean KL to transformers in fp32, {escape(found.model)}</text>',
        f'<text class="small" x="{MARGIN}" y="42">nats; full: the base model, open: an adapter; dashed: our limit for '
        f"the default, {MEAN_KL.bound}</text>",
    ]
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{HEAD - 12}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:g}</text>')
    limit = at(MEAN_KL.bound)
    parts.append(f'<line class="limit" x1="{limit:.1f}" y1="{HEAD - 12}" x2="{limit:.1f}" y2="{bottom}"/>')
    for index, each in enumerate(shown):
        y = HEAD + ROW * index + ROW / 2
        title = f"{each.arm} (default)" if each.arm == default else each.arm
        kind = "default" if each.arm == default else ""
        parts.append(
            f'<g><title>{escape(each.about)}</title><text class="{kind}" x="{MARGIN}" y="{y + 5:g}">{title}</text>'
        )
        for one in each.divergences:
            mark = "dot" if one.adapter == BASE else "open"
            parts.append(f'<circle class="{mark}" cx="{at(one.mean_kl[0]):.1f}" cy="{y:g}" r="5"/>')
        farthest = max(one.mean_kl[0] for one in each.divergences)
        base = next((one.mean_kl[0] for one in each.divergences if one.adapter == BASE), farthest)
        parts.append(f'<text class="value" x="{at(farthest) + 10:.1f}" y="{y + 4:g}">{base:.4f}</text></g>')
    return "\n".join([*parts, "</svg>"]) + "\n"
