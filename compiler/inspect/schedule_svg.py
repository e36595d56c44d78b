"""A program's schedule as SVG: time runs down, main stream left, side stream right, waits as arrows."""

from collections.abc import Sequence
from html import escape

from ..cost.estimate import Placed
from ..program.buffers import Buffer, describe_view
from ..program.calls import traits_of
from ..program.program import Program, Step

ROW, BOX, WIDTH, GAP, MARGIN, HEAD = 26, 20, 470, 110, 20, 64
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1c2430 }
.title { font-size: 15px; font-weight: 600 } .lane { font-size: 13px; font-weight: 600 } .small { font-size: 10px; fill: #5b6675 }
.box { stroke: #33415580; rx: 3 } .wait { stroke: #b4232a; stroke-width: 1.4; fill: none; marker-end: url(#head) }
.rail { stroke: #94a3b8; stroke-dasharray: 2 4 }
"""
ARROW_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#b4232a"/></marker></defs>'
)
# an op's family -> fill; page/page.css has the page's colours, for two themes
COLOURS = {
    "lora": "#f6c7a8",
    "attention": "#c9b8f0",
    "rope": "#d9ccf5",
    "linear": "#a9cdf2",
    "moe": "#b5dfe8",
    "norm": "#bfe3c0",
    "silu": "#d5ecb4",
    "quantize": "#e6e3a1",
    "collective": "#f3b6c4",
    "other": "#d7dde5",
    "foreign": "#f3f4f6",
}


def schedule_svg(program: Program, timing: Sequence[Placed]) -> str:
    """Return the schedule as SVG text; `timing` (from `estimate`) is shown with each step."""
    lanes = ["main", "side"] if any(step.stream == "side" for step in program.steps) else ["main"]
    left = {"main": MARGIN, "side": MARGIN + WIDTH + GAP}
    width = MARGIN * 2 + WIDTH * len(lanes) + GAP * (len(lanes) - 1)
    height = HEAD + ROW * len(program.steps) + MARGIN
    total = max((placed.end for placed in timing), default=0.0) * 1e6
    arena = f"arena {program.arena_bytes / 2**20:.2f} MiB"
    headline = f"{program.name}: {len(program.steps)} steps, about {total:.1f} us, {arena}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        ARROW_HEAD,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="{MARGIN}" y="24">{escape(headline)}</text>',
    ]
    for lane in lanes:
        middle = left[lane] + 12
        parts.append(f'<text class="lane" x="{left[lane]}" y="{HEAD - 12}">{lane} stream</text>')
        parts.append(f'<line class="rail" x1="{middle}" y1="{HEAD - 4}" x2="{middle}" y2="{height - MARGIN}"/>')
    buffers = program.by_name
    for step, placed in zip(program.steps, timing, strict=True):
        parts.append(_box(step, placed, left[step.stream], buffers))
    for step in program.steps:
        parts.extend(_arrow(program.steps[wait], step, left) for wait in step.waits)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _middle(index: int) -> float:
    return HEAD + ROW * index + BOX / 2


def _box(step: Step, placed: Placed, left: int, buffers: dict[str, Buffer]) -> str:
    top = HEAD + ROW * step.index
    fill = COLOURS[traits_of(step.op).family]
    notes = [
        f"{step.sm_budget} SMs" if step.sm_budget else "",
        "PDL" if step.pdl else "",
        f"{(placed.end - placed.start) * 1e6:.1f} us",
    ]
    outs = ", ".join(describe_view(view, buffers) for view in step.outs) or "in place"
    title = f"{step.index} {step.name}\n{step.op}\n-> {outs}\nwaits for {', '.join(map(str, step.waits)) or 'nothing'}"
    first = next((describe_view(view, buffers) for view in step.outs if 0 not in view.shape), "")
    label = f"{step.index:>3} {step.op.removeprefix('sidestream.')}"
    label = label if len(label) <= 31 else f"{label[:30]}…"
    note = "  ".join(filter(None, notes))
    return (
        f'<g><title>{escape(title)}</title><rect class="box" x="{left}" y="{top}" width="{WIDTH}" height="{BOX}" '
        f'fill="{fill}"/>'
        f'<text x="{left + 6}" y="{top + 14}">{escape(label)}</text><text class="small" x="{left + 235}" '
        f'y="{top + 14}">{escape(first)}</text>'
        f'<text class="small" x="{left + WIDTH - 6}" y="{top + 14}" text-anchor="end">{escape(note)}</text></g>'
    )


def _arrow(source: Step, target: Step, left: dict[str, int]) -> str:
    y1, y2 = _middle(source.index), _middle(target.index)
    if source.stream == "main":
        x1, x2 = left["main"] + WIDTH, left["side"]
    else:
        x1, x2 = left["side"], left["main"] + WIDTH
    bend = (x1 + x2) / 2
    return f'<path class="wait" d="M{x1} {y1:g}C{bend:g} {y1:g} {bend:g} {y2:g} {x2} {y2:g}"/>'
