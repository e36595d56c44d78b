"""Results of passes for people: graphs as Python with shapes, op counts, tables."""

import operator
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .graph.nodes import is_kernel, op_name
from .program.buffers import short_dtype
from .program.layers import HEAD, TAIL, graph_layers, spans
from .program.sizes import describe_size, symbol_roles

PACKAGE = Path(__file__).resolve().parents[1]
WIDTH = 100  # characters of a table for a terminal
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)')


@dataclass(frozen=True)
class GraphLine:
    """A node as a line of text.

    layer      see `layers.graph_layers`
    parameter  whether the node is an input of the graph
    module     path of the node's module, "" if unknown
    source     file, line and text of its call, "" if unknown
    """

    text: str
    layer: int
    parameter: bool = False
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class PassRecord:
    """The result of one pass: matches, reasons of near-misses, kernel counts, graphs before and after, wall seconds.

    Graphs are text, and lines by node. `about` is the first paragraph of the pass's docstring.
    """

    name: str
    tier: str
    matches: int
    rejected: list[str]
    ops_before: dict[str, int]
    ops_after: dict[str, int]
    before: str
    after: str
    seconds: float
    lines_before: tuple[GraphLine, ...] = ()
    lines_after: tuple[GraphLine, ...] = ()
    about: str = ""


def op_counts(graph: fx.GraphModule | fx.Graph) -> dict[str, int]:
    """Return op name -> number of calls that launch a kernel, sorted by name."""
    nodes = (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    return dict(sorted(Counter(op_name(node) for node in nodes if is_kernel(node)).items()))


def graph_lines(graph: fx.GraphModule | fx.Graph) -> tuple[GraphLine, ...]:
    """Return the graph as Python source, node by node, with dtype and shape of each value in a comment.

    Dimensions are T tokens, B sequences, P blocks and NP pages. Equal graphs give equal lines.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    roles, layers = symbol_roles(graph), graph_layers(graph)
    lines = []
    for node in graph.nodes:
        shape = _describe(node.meta.get("val"), roles)
        if node.op == "placeholder":
            recipe = node.meta.get("recipe")
            source = f" = {recipe}" if recipe is not None else ""
            text = f"{node.name},  # {shape}  {node.meta.get('kind', 'input')}{source}"
        elif node.op == "output":
            text = f"return {_argument(node.args[0])}"
        else:
            lane = f"  {node.meta['stream']} stream" if node.meta.get("stream", "main") != "main" else ""
            share = f", {node.meta['sm_share']:.0%} of the SMs" if lane and "sm_share" in node.meta else ""
            text = f"{node.name} = {_expression(node)}  # {shape}{lane}{share}"
        module = next((path for path, _ in reversed(node.meta.get("nn_module_stack", {}).values())), "")
        trace = node.meta.get("stack_trace") or ""
        lines.append(GraphLine(text, layers[node], node.op == "placeholder", module, source_line(trace)))
    return tuple(lines)


def text_of(lines: Sequence[GraphLine], only: Container[int] | None = None) -> str:
    """Join lines into one Python function.

    `only`: keep these layers, and nodes outside of layers; a comment lists the others.
    """
    keep = [only is None or line.layer in (HEAD, TAIL) or line.layer in only for line in lines]
    left_out = spans(line.layer for line, kept in zip(lines, keep, strict=True) if not kept)
    parameters = [f"    {line.text}" for line, kept in zip(lines, keep, strict=True) if kept and line.parameter]
    body = [f"    {line.text}" for line, kept in zip(lines, keep, strict=True) if kept and not line.parameter]
    note = [f"    # left out: layers {left_out}"] if left_out else []
    return "\n".join(["def forward(", *parameters, "):", *note, *(body or ["    pass"])]) + "\n"


@lru_cache(maxsize=4096)  # the nodes of a source line share a traceback, and it is the same in each pass's graphs
def source_line(stack_trace: str) -> str:
    """Return a traceback's innermost frame: `graphs/llama.py:87  return self.o_proj(...)`, relative to the package."""
    frames = _FRAME.findall(stack_trace)
    if not frames:
        return ""
    file, number, text = frames[-1]
    path = Path(file)
    if path.is_relative_to(PACKAGE) and "site-packages" not in path.relative_to(PACKAGE).parts:
        name = path.relative_to(PACKAGE).as_posix()
    else:
        name = file.rpartition("site-packages/")[2] if "site-packages/" in file else path.name
    return f"{name}:{number}  {text.strip()}".rstrip()


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    arguments = [*map(_argument, node.args), *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())]
    name = (
        op_name(node)
        if isinstance(node.target, torch._ops.OpOverload)
        else f"{getattr(node.target, '__module__', '').strip('_')}.{op_name(node)}"
    )
    return f"{name}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return f"slice({_argument(value.start)}, {_argument(value.stop)}, {_argument(value.step)})"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return repr(value) if isinstance(value, str) else str(value)


def _describe(value: Any, roles: Mapping[Any, str]) -> str:
    if isinstance(value, torch.Tensor):
        return f"{short_dtype(value.dtype)}[{', '.join(describe_size(size, roles) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_describe(entry, roles) for entry in value)})"
    if isinstance(value, (int, torch.SymInt)):
        return f"int {describe_size(value, roles)}"
    return "none" if value is None else type(value).__name__


def pass_table(records: Sequence[PassRecord]) -> str:
    """Return a table with one row per pass: tier, matches, refusals, kernels before and after, ops added and removed.

    It has no timings. Lines have at most `WIDTH` characters; longer changes continue in the next line.
    """
    head = ("pass", "tier", "matches", "rejected", "kernels")
    cells = []
    for record in records:
        kernels = f"{sum(record.ops_before.values())} -> {sum(record.ops_after.values())}"
        cells.append((record.name, record.tier, str(record.matches), str(len(record.rejected)), kernels))
    left = WIDTH - sum(max(map(len, column)) + 2 for column in zip(head, *cells, strict=True))
    rows = [(*head, "changes")]
    for record, own in zip(records, cells, strict=True):
        change = Counter(record.ops_after)
        change.subtract(record.ops_before)
        moves = sorted(change.items(), key=lambda entry: (entry[1], entry[0]))
        lines = _lines([f"{count:+d} {name}" for name, count in moves if count], left)
        rows += [(*(own if not number else [""] * len(own)), line) for number, line in enumerate(lines)]
    return columns(rows, right=(2, 3))


def _lines(parts: Sequence[str], width: int) -> list[str]:
    """Join parts with commas into lines of at most `width` characters; at least one line."""
    lines = [""]
    for number, part in enumerate(parts):
        text = part + ("," if number + 1 < len(parts) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append(text)
        else:
            lines[-1] = f"{lines[-1]} {text}".strip()
    return lines


def merge_reasons(reasons: Iterable[str]) -> list[str]:
    """Merge reasons that differ only in numbers (one refusal per layer): `silu_1 is also used by mul_3  x 32`."""
    groups: dict[str, list[str]] = {}
    for reason in reasons:
        groups.setdefault(re.sub(r"_?\d+", "", reason), []).append(reason)
    return [own[0] + (f"  x {len(own)}" if len(own) > 1 else "") for own in groups.values()]


def refusals(records: Iterable[PassRecord]) -> str:
    """Return each pass's near-misses with their reasons, one per line."""
    return "".join(f"{record.name}: {reason}\n" for record in records for reason in merge_reasons(record.rejected))


def columns(rows: Sequence[Sequence[str]], right: Container[int] = (), width: int | None = None, keys: int = 1) -> str:
    """Return rows of text as a table; the first row is underlined, and columns in `right` are right-aligned.

    A table wider than `width` continues below with its first `keys` columns repeated, without rows that are empty
    there.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    parts: list[list[int]] = [[]]
    for column in range(len(widths)):
        shown = [*parts[-1], column]
        if width is not None and len(parts[-1]) > keys and sum(widths[each] + 2 for each in shown) - 2 > width:
            parts.append([*range(keys), column])
        else:
            parts[-1] = shown
    tables = []
    for number, shown in enumerate(parts):
        lines = []
        for index, row in enumerate(rows):
            if number and not any(row[column] for column in shown[keys:]):
                continue
            cells = [
                row[column].rjust(widths[column]) if column in right else row[column].ljust(widths[column])
                for column in shown
            ]
            lines.append("  ".join(cells).rstrip())
            if index == 0:
                lines.append("  ".join("-" * widths[column] for column in shown))
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)
