"""Breakdown of a program's estimated time, and the effect of options on it, as plain values (for JSON) and as text."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import fx

from ..build_program import build_program
from ..cost.bytes_and_flops import DEFAULT, Assumptions, windows_of
from ..cost.estimate import KNOWN_ERROR, critical_path, estimate, floor_seconds, step_costs, total_seconds
from ..cost.hardware import H200, Gpu
from ..expected_matches import PassCountError
from ..graph.capture import Captured
from ..options import CompileOptions, OptionError
from ..pass_records import WIDTH, PassRecord, columns, pass_table
from ..pipeline import ALWAYS_ON, EXPERT_PASSES, PASSES, STATIC_PASSES, optimize
from ..program.layers import HEAD, TAIL, step_layers
from ..program.program import Bucket, Program

TOP_OPS = 12
SAME = 0.0005  # smaller relative differences count as none
# not varied: options without an effect on programs, `disable` (each pass is), and options that omit a part of the step
NO_NUMBERS = ("check_counts", "disable", "gather_logits")


@dataclass(frozen=True)
class WhatIf:
    """A change of options, the step's seconds with it, and the difference (negative: faster)."""

    change: str
    seconds: float
    difference: float


def explain_program(program: Program, assume: Assumptions = DEFAULT, gpu: Gpu = H200) -> dict[str, Any]:
    """Return kernels by lane and layer, estimate and floor, and the parts of the critical path.

    Units are microseconds and bytes.
    """
    costs = step_costs(program, assume, gpu)
    placed = estimate(program, assume, gpu, costs)
    path = critical_path(program, placed)
    total, floor = total_seconds(placed), floor_seconds(program, assume, gpu)
    fixed = sum(costs[index].fixed for index in path)
    streaming = {"bytes": 0.0, "flops": 0.0}
    for index in path:
        cost = costs[index]
        computing = sum(flops / gpu.flops_per_second(width) for width, flops in cost.work.flops.items())
        streaming["flops" if computing > cost.work.bytes / gpu.bytes_per_second() else "bytes"] += (
            cost.seconds - cost.fixed
        )
    layers = step_layers(program)
    inner = sorted({layer for layer in layers if layer not in (HEAD, TAIL)})
    typical = inner[len(inner) // 2] if inner else None
    lanes = Counter(step.stream for step, layer in zip(program.steps, layers, strict=True) if layer == typical)
    return {
        "program": program.name,
        "steps": len(program.steps),
        "main": sum(step.stream == "main" for step in program.steps),
        "side": sum(step.stream == "side" for step in program.steps),
        "waits": sum(len(step.waits) for step in program.steps),
        "layers": len(inner),
        "kernels_of_a_layer": {"main": lanes["main"], "side": lanes["side"]},
        "arena_bytes": program.arena_bytes,
        "passes": program.passes,
        "context": assume.context_of(program),
        "windows": windows_of(program),
        "adapters": assume.adapters_of(
            program, max((buffer.shape[0] for buffer in program.of_kind("adapter")), default=0)
        ),
        "estimated_us": total * 1e6,
        "floor_us": floor * 1e6,
        "of_floor": floor / total if total else 1.0,
        "critical_path": {
            "steps": len(path),
            "launch_and_latency_us": fixed * 1e6,
            "bytes_us": streaming["bytes"] * 1e6,
            "flops_us": streaming["flops"] * 1e6,
            "lanes_wait_us": max(0.0, total - fixed - sum(streaming.values())) * 1e6,
        },
        "ops": _ops(program, set(path), costs, [each.end - each.start for each in placed]),
    }


def _ops(program: Program, path: set[int], costs: Sequence[Any], seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Return time by op and lane, sorted by its share of the critical path."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    empty = {"steps": 0, "critical_us": 0.0, "us": 0.0, "bytes": 0, "link_bytes": 0, "flops": 0.0, "floor_us": 0.0}
    for step, cost, taken in zip(program.steps, costs, seconds, strict=True):
        row = rows.setdefault((step.op, step.stream), {"op": step.op, "lane": step.stream, **empty})
        row["steps"] += 1
        row["us"] += taken * 1e6
        row["critical_us"] += taken * 1e6 if step.index in path else 0.0
        row["bytes"] += cost.work.bytes
        row["link_bytes"] += cost.work.link_bytes
        row["flops"] += cost.work.total_flops
        row["floor_us"] += cost.floor * 1e6
    return sorted(rows.values(), key=lambda row: (-row["critical_us"], -row["us"], row["op"]))


def explain(
    options: CompileOptions,
    records: Sequence[PassRecord],
    programs: Sequence[Program],
    assume: Assumptions = DEFAULT,
    gpu: Gpu = H200,
) -> dict[str, Any]:
    """Return options, passes and programs of a compilation as values for JSON."""
    return {
        "gpu": gpu.to_json(),
        "error": KNOWN_ERROR,
        "options": options.to_dict(),
        "passes": [describe_pass(record) for record in records],
        "programs": [explain_program(program, assume, gpu) for program in programs],
    }


def describe_pass(record: PassRecord) -> dict[str, Any]:
    """Return a pass record without the graph's text and without times."""
    before, after = sum(record.ops_before.values()), sum(record.ops_after.values())
    return {
        "name": record.name,
        "tier": record.tier,
        "matches": record.matches,
        "rejected": record.rejected,
        "kernels_before": before,
        "kernels_after": after,
    }


def what_ifs(
    capture: Callable[[CompileOptions], tuple[Captured, Sequence[str]]],
    options: CompileOptions,
    bucket: Bucket,
    *,
    assume: Assumptions = DEFAULT,
    gpu: Gpu = H200,
) -> dict[str, float]:
    """Return change -> estimated seconds of the step; "" is the program without a change.

    `capture(options)` returns a new graph and the module's parameter names. Changes are the other values of each
    option, one at a time, and each pass disabled, except those that can't be compiled or give the same program.
    """
    seconds: dict[str, float] = {}
    base: Program | None = None
    base_graph: fx.GraphModule | None = None
    shared: set[str] = set()  # passes of the graph, which all programs share
    for change, changed, variant in (("", options, bucket), *_variants(options, bucket)):
        added = set(changed.disable) - set(options.disable)
        # passes for static sizes run later and do not need another graph
        same_graph = changed is options or (added and not added & shared)
        try:
            graph = base_graph if same_graph else None
            if graph is None:
                captured, names = capture(changed)
                optimized = optimize(captured, changed, names, text=False)
                graph, shared = optimized.captured.graph_module, shared or {each.name for each in optimized.records}
            program = build_program(graph, variant, changed)
        except (OptionError, PassCountError, ValueError, RuntimeError):
            if not change:
                raise
            continue
        if base is None:
            base, base_graph = program, graph
        elif program == base:
            continue
        seconds[change] = total_seconds(estimate(program, assume, gpu))
    return seconds


def _variants(options: CompileOptions, bucket: Bucket) -> Iterator[tuple[str, CompileOptions, Bucket]]:
    hints = get_type_hints(CompileOptions)
    if bucket.lora:
        yield "no adapter in the batch", options, replace(bucket, lora=False)
    for field in fields(CompileOptions):
        kind, now = hints[field.name], getattr(options, field.name)
        switches = (True, False) if kind is bool or bool in get_args(kind) else ()
        values = get_args(kind) if get_origin(kind) is Literal else switches
        for value in values if field.name not in NO_NUMBERS else ():
            if value not in (now, "auto", "fp32"):
                try:
                    yield f"{field.name}={value}", replace(options, **{field.name: value}), bucket
                except OptionError:
                    continue
    for name in dict.fromkeys(each.name for each in (*PASSES, *EXPERT_PASSES.values(), *STATIC_PASSES)):
        if name not in ALWAYS_ON and name not in options.disable:
            yield f"without {name}", replace(options, disable=(*options.disable, name), check_counts=False), bucket


def compare_changes(seconds: Mapping[str, float]) -> list[WhatIf]:
    """Return the result of `what_ifs` as differences, the largest gain first."""
    now = seconds[""]
    found = [WhatIf(change, taken, taken - now) for change, taken in seconds.items() if change]
    return sorted(found, key=lambda each: (each.difference, each.change))


def program_as_text(facts: Mapping[str, Any]) -> str:
    """Return `explain_program`'s values as text."""
    path, layer = facts["critical_path"], facts["kernels_of_a_layer"]
    total = facts["estimated_us"] or 1.0
    parts = [
        ("launch and latency", "launch_and_latency_us"),
        ("bytes", "bytes_us"),
        ("FLOPs", "flops_us"),
        ("contention of the lanes", "lanes_wait_us"),
    ]
    shares = ", ".join(
        f"{name} {path[key]:.1f} us ({path[key] / total:.0%})" for name, key in parts if path[key] >= 0.05
    )
    linked = [row for row in facts["ops"] if row["link_bytes"]]
    link = ("NVLink MB",) if linked else ()
    rows = [("op", "lane", "steps", "us", "of the path", "MB", *link, "GFLOP", "floor us", "reached")]
    for row in facts["ops"][:TOP_OPS]:
        share = f"{row['critical_us'] / total:.1%}" if row["critical_us"] else "not on it"
        reached = f"{row['floor_us'] / row['us']:.0%}" if row["us"] else ""
        moved, computed, floor = f"{row['bytes'] / 1e6:.2f}", f"{row['flops'] / 1e9:.2f}", f"{row['floor_us']:.1f}"
        rows.append(
            (
                row["op"].removeprefix("sidestream."),
                row["lane"],
                str(row["steps"]),
                f"{row['us']:.1f}",
                share,
                moved,
                *((f"{row['link_bytes'] / 1e6:.2f}",) if linked else ()),
                computed,
                floor,
                reached,
            )
        )
    over_link = [
        f"  between ranks: {sum(row['link_bytes'] for row in linked) / 1e6:.2f} MB over NVLink in "
        f"{sum(row['steps'] for row in linked)} collectives, floor {sum(row['floor_us'] for row in linked):.1f} us"
    ]
    left = len(facts["ops"]) - TOP_OPS
    sequences = f"{facts['context']} cached tokens per sequence" + (
        f", {facts['adapters']} adapters in the batch" if facts["adapters"] else ""
    )
    lines = [_wrap(f"  {line}") for line in facts["passes"].splitlines()]
    own = ["", "  its own passes, on static sizes:", *lines] if lines else []
    return "\n".join(
        [
            f"{facts['program']}, {sequences}",
            _wrap(
                f"  about {facts['estimated_us']:.1f} us per step, {facts['of_floor']:.0%} of the floor's speed "
                f"(floor {facts['floor_us']:.1f} us: weights, cache and adapters read once)"
            ),
            f"  {facts['steps']} kernels: {layer['main']} main and {layer['side']} side in each of {facts['layers']} "
            "layers; "
            f"{facts['waits']} waits between the lanes",
            _wrap(f"  the {path['steps']} steps of the critical path: {shares}"),
            *(
                f"  {count} of its attentions read only the newest {window} tokens of a sequence"
                for window, count in facts["windows"].items()
            ),
            *(over_link if linked else ()),
            *own,
            "",
            columns(rows, right=range(2, len(rows[0])))
            + (f"and {left} other ops; --json has all\n" if left > 0 else ""),
        ]
    )


def _wrap(line: str) -> str:
    """Wrap a line to WIDTH with further indentation."""
    inner = " " * (len(line) - len(line.lstrip()) + 2)
    if len(line) <= WIDTH:
        return line
    return textwrap.fill(line, WIDTH, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def as_text(facts: Mapping[str, Any], records: Sequence[PassRecord]) -> str:
    """Return `explain`'s values as text."""
    refused = sum(len(record.rejected) for record in records)
    note = f"{refused} near-misses were refused; `sidestream inspect dump` writes the reasons to rejected.txt\n"
    parts = [pass_table(records) + (note if refused else "")]
    gpu = facts["gpu"]
    source = (
        f"Estimates for {gpu['name']} at {gpu['bytes_per_second'] / 1e12:.2f} TB/s ({gpu['source']}); their error is "
        f"{facts['error']}."
    )
    parts.append(_wrap(source) + "\n")
    parts += [program_as_text(program) for program in facts["programs"]]
    return "\n".join(parts)


def changes_as_text(changes: Sequence[WhatIf], now: float, bucket: str) -> str:
    """Return the table of changes."""
    rows, same = [("change", "us per step", "difference")], []
    for each in changes:
        if abs(each.difference) < SAME * now:
            same.append(each.change)
        else:
            rows.append((each.change, f"{each.seconds * 1e6:.1f}", f"{each.difference / now:+.1%}"))
    end = "\n" + _wrap(f"no difference: {', '.join(same)}") + "\n" if same else ""
    return f"Effect of changes on {bucket} (now {now * 1e6:.1f} us)\n\n{columns(rows, right=(1, 2))}{end}"
