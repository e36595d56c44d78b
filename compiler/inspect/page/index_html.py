"""The page's data as plain JSON values, and its HTML.

The graphs of all passes share most lines, so each distinct line is stored once.
"""

import html
import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ...cost.estimate import KNOWN_ERROR, critical_path, estimate, floor_seconds, step_costs, total_seconds
from ...cost.hardware import H200, Gpu
from ...cost.kernel_resources import launched_kernels
from ...cost.timings import Timings, TimingsError
from ...options import DEFAULT_LORA_DTYPE, LAYERED, CompileOptions
from ...pass_records import GraphLine, PassRecord
from ...pipeline import PASSES, with_expert_passes
from ...program.buffers import View, describe_view, short_dtype, views_in
from ...program.calls import FOREIGN, describe, overload_of, traits_of
from ...program.layers import HEAD, TAIL, step_layers
from ...program.memory import unshared_bytes
from ...program.program import Program, Step
from .kernel_sources import kernel_sources

Sections = dict[str, list[int]]


def page_data(
    records: Sequence[PassRecord],
    programs: Sequence[Program],
    *,
    title: str,
    version: str,
    options: CompileOptions | None = None,
    layers: Container[int] | None = None,
    timings: Timings | None = None,
    ledger: Mapping[str, float] | None = None,
    gpu: Gpu = H200,
) -> dict[str, Any]:
    """Return the page's data, with times estimated for `gpu`.

    `timings`: measured times; `ledger`: pass -> relative error; `layers`: layers of the graphs to show.
    """
    timings, ledger = timings or Timings(), ledger or {}
    lines = _Lines(layers)
    passes = _passes(records, lines, timings, ledger, options)
    resources = timings.resources
    launched = launched_kernels(programs)
    kernels = sorted({name for own in launched.values() for step in own for name in step})
    sources = kernel_sources((step.op for program in programs for step in program.steps), resources.kernels)
    return {
        "title": title,
        "error": KNOWN_ERROR,
        "gpu": gpu.name,
        "version": version,
        "options": {} if options is None else options.to_dict(),
        "passes": passes,
        "graph_ops": dict(records[-1].ops_after) if records else {},
        "graphs": lines.graphs,
        "lines": lines.table,
        "modules": list(lines.modules),
        "sources": list(lines.sources),
        "launched": kernels,
        "programs": [
            _program(program, timings, [[kernels.index(name) for name in step] for step in launched[program.name]], gpu)
            for program in programs
        ],
        **({"device": timings.device} if timings.device else {}),
        "recipes": {name: str(recipe) for program in programs for name, recipe in program.recipes.items()},
        "functions": sources.functions,
        "ops": sources.ops,
        "families": {
            op: traits_of(op).family
            for op in sorted({step.op for program in programs for step in program.steps})
            if traits_of(op).family != FOREIGN.family
        },
        **(
            {"target": resources.target, "variants": list(resources.variants), "refused": dict(resources.refused)}
            if resources.target
            else {}
        ),
    }


def layer_key(layer: int) -> str:
    """Return `start`, `0`, `1` ..., or `end`."""
    return {HEAD: "start", TAIL: "end"}.get(layer, str(layer))


class _Lines:
    """Numbered distinct lines, modules and sources, and graphs as line numbers for each layer."""

    def __init__(self, only: Container[int] | None) -> None:
        self.only = only
        self.table: list[list[Any]] = []
        self.modules: dict[str, int] = {"": 0}
        self.sources: dict[str, int] = {"": 0}
        self.graphs: list[Sections] = []
        self._lines: dict[GraphLine, int] = {}
        self._known: dict[int, tuple[int, Sequence[GraphLine]]] = {}  # id of a sequence (kept alive here) -> its graph

    def graph(self, lines: Sequence[GraphLine]) -> int:
        """Return the number of a graph; one pass's result is the next one's input."""
        known = self._known.get(id(lines))
        if known is not None:
            return known[0]
        sections: Sections = {}
        for line in sorted(lines, key=lambda line: line.layer):
            if self.only is None or line.layer in (HEAD, TAIL) or line.layer in self.only:
                sections.setdefault(layer_key(line.layer), []).append(self._line(line))
        number = next((index for index, graph in enumerate(self.graphs) if graph == sections), len(self.graphs))
        if number == len(self.graphs):
            self.graphs.append(sections)
        self._known[id(lines)] = (number, lines)
        return number

    def _line(self, line: GraphLine) -> int:
        number = self._lines.setdefault(line, len(self.table))
        if number == len(self.table):
            module = self.modules.setdefault(line.module, len(self.modules))
            self.table.append([line.text, module, self.sources.setdefault(line.source, len(self.sources))])
        return number


def _passes(
    records: Sequence[PassRecord],
    lines: _Lines,
    timings: Timings,
    ledger: Mapping[str, float],
    options: CompileOptions | None,
) -> list[dict[str, Any]]:
    """Return all passes in order: those that ran, and the disabled ones."""
    shown = [_pass(record, lines, timings, ledger) for record in records]
    if options is None:
        return shown
    for entry in shown:
        reason = "" if entry["matches"] or entry["rejected"] else disabling_option(entry["name"], options)
        entry |= {"off": reason} if reason else {}
    routed = any("sidestream.moe_route" in record.ops_before for record in records)
    passes = with_expert_passes(PASSES) if routed else PASSES
    order = [each.name for each in passes]
    for number, each in enumerate(passes):
        if each.name not in options.disable or not shown:
            continue
        earlier = [place for place, entry in enumerate(shown) if entry["name"] in order[:number]]
        place = earlier[-1] + 1 if earlier else 0
        graph = shown[place - 1]["after"] if place else shown[0]["before"]
        count = shown[place - 1]["kernels"][1] if place else shown[0]["kernels"][0]
        about = {"name": each.name, "tier": each.tier, "about": each.about}
        unchanged = {"kernels": [count, count], "changes": [], "before": graph, "after": graph}
        off = disabling_option(each.name, options)
        shown.insert(place, {**about, "matches": 0, "rejected": [], **unchanged, "off": off})
    return shown


def _pass(record: PassRecord, lines: _Lines, timings: Timings, ledger: Mapping[str, float]) -> dict[str, Any]:
    change = Counter(record.ops_after)
    change.subtract(record.ops_before)
    shown: dict[str, Any] = {
        "name": record.name,
        "tier": record.tier,
        "about": record.about,
        "matches": record.matches,
        "rejected": record.rejected,
        "kernels": [sum(record.ops_before.values()), sum(record.ops_after.values())],
        "changes": [
            [name, count] for name, count in sorted(change.items(), key=lambda entry: (entry[1], entry[0])) if count
        ],
        "before": lines.graph(record.lines_before),
        "after": lines.graph(record.lines_after),
    }
    if record.name in timings.passes:
        shown["seconds"] = timings.passes[record.name]
    if record.name in ledger:
        shown["error"] = ledger[record.name]
    return shown


def _program(program: Program, timings: Timings, kernels: Sequence[Sequence[int]], gpu: Gpu) -> dict[str, Any]:
    costs, layers = step_costs(program, gpu=gpu), step_layers(program)
    placed = estimate(program, gpu=gpu, costs=costs)
    launched = timings.resources.launches.get(program.name, ())
    if launched and len(launched) != len(program.steps):
        raise TimingsError(
            f"the resources of {program.name} have {len(launched)} steps, but the program has {len(program.steps)}; "
            "dump with --resources again"
        )
    place = {buffer.name: index for index, buffer in enumerate(program.buffers)}
    by_name = program.by_name

    def tensors(views: Sequence[View]) -> list[list[Any]]:
        return [[place[view.buffer], describe_view(view, by_name)] for view in dict.fromkeys(views)]

    steps = []
    for step, cost, where, layer in zip(program.steps, costs, placed, layers, strict=True):
        entry: dict[str, Any] = {
            "name": step.name,
            "op": step.op,
            "lane": step.stream,
            "layer": layer_key(layer),
            "waits": list(step.waits),
            "start": _us(where.start),
            "end": _us(where.end),
            "bytes": cost.work.bytes,
            "link_bytes": cost.work.link_bytes,
            "flops": cost.work.total_flops,
            "floor": _us(cost.floor),
            "alone": _us(cost.seconds),
            "fixed": _us(cost.fixed),
            "bound": cost.bound,
            "reads": tensors(list(step.inputs())),
            "writes": tensors(step.outs),
            "settings": _settings(step),
            "kernels": list(kernels[step.index]),
        }
        entry |= {"sms": step.sm_budget} if step.sm_budget else {}
        entry |= {"pdl": True} if step.pdl else {}
        entry |= {"variants": list(launched[step.index])} if launched else {}
        steps.append(entry)
    shown: dict[str, Any] = {
        "name": program.name,
        "bucket": {} if program.bucket is None else vars(program.bucket).copy(),
        "arena": program.arena_bytes,
        "unshared": unshared_bytes(program),
        "total": _us(total_seconds(placed)),
        "floor": _us(floor_seconds(program, gpu=gpu)),
        "critical": critical_path(program, placed),
        "passes": program.passes,
        "steps": steps,
        "buffers": [
            [
                buffer.name,
                buffer.kind,
                f"{short_dtype(buffer.dtype)}[{', '.join(map(str, buffer.shape))}]",
                buffer.nbytes,
                buffer.offset,
                *buffer.life,
            ]
            for buffer in program.buffers
        ],
    }
    measured = timings.steps.get(program.name)
    if measured is not None:
        if len(measured) != len(program.steps):
            raise TimingsError(
                f"the timings of {program.name} have {len(measured)} steps, but the program has {len(program.steps)}; "
                "measure it again"
            )
        shown["measured"] = [[_us(start), _us(end)] for start, end in measured]
    return shown


def _settings(step: Step) -> str:
    """Return the arguments that are not tensors, with their names, as text."""
    names = [argument.name for argument in overload_of(step.op)._schema.arguments]
    given = [*zip(names, step.args, strict=False), *step.kwargs]
    shown = [(name, value) for name, value in given if value is not None and not list(views_in(value))]
    return ", ".join(f"{name}={describe(value)}" for name, value in shown)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


_QUANTIZING = ("quantize_linears", "fuse_quantize")


def disabling_option(name: str, options: CompileOptions) -> str:
    """Return the option that disables the pass `name`, as `option=value`; "" for an enabled pass."""
    if name in options.disable:
        return f"disable_passes={name}"
    if name in LAYERED and getattr(options, name) is False:
        return f"{name}=False"
    if name == "quantize_kv" and not options.quantizes_kv:
        return f"precision={options.precision}, kv_dtype={options.kv_dtype}"
    if name in _QUANTIZING and not options.quantizes:
        return f"precision={options.precision}"
    if name == "quantize_lora" and not options.quantizes_lora:
        chosen = options.lora_dtype if options.lora_dtype != "auto" else DEFAULT_LORA_DTYPE.get(options.precision)
        return f"precision={options.precision}" + (f", lora_dtype={chosen}" if chosen else "")
    return ""


SCRIPTS = (
    "dom.js",
    "base.js",
    "tabs.js",
    "overview.js",
    "passes.js",
    "schedule.js",
    "memory.js",
    "kernels.js",
    "start.js",
)


def render(data: Mapping[str, Any]) -> str:
    """Return `page_data`'s values as HTML text."""
    # escape `</script>`, which would end the element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    scripts = "\n".join(part(name) for name in SCRIPTS)
    page = part("page.html")
    for mark, content in (
        ("TITLE", html.escape(data["title"])),
        ("STYLE", part("look.css") + part("page.css")),
        ("SCRIPT", scripts),
        ("DATA", text),
    ):
        page = page.replace(f"<!--{mark}-->", content, 1)
    return page


@cache
def part(name: str) -> str:
    """Return one of the page's files."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
