"""Write everything about a compilation as readable, diffable files.

Equal inputs give equal bytes. Only `timings.json`, and on request the page, has measured times; all others are
estimates.
"""

import difflib
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import __version__
from ..cost.bytes_and_flops import step_bytes
from ..cost.estimate import estimate
from ..cost.hardware import H200, Gpu
from ..cost.timings import Timings
from ..options import CompileOptions
from ..pass_records import PassRecord, columns, pass_table, refusals, text_of
from ..program.buffers import describe_view, short_dtype
from ..program.calls import describe
from ..program.memory import unshared_bytes
from ..program.program import Program
from .chrome_trace import trace
from .page.index_html import page_data, render
from .schedule_svg import schedule_svg


def dump(
    directory: str | Path,
    records: Sequence[PassRecord],
    programs: Sequence[Program] = (),
    *,
    options: CompileOptions | None = None,
    title: str = "A compiled model",
    layers: Container[int] | None = None,
    timings: Timings | None = None,
    show_timings: bool = False,
    show_resources: bool = False,
    ledger: Mapping[str, float] | None = None,
    gpu: Gpu = H200,
) -> list[Path]:
    """Write the dump and return its files, in order.

    For pass number NN: `NN_pass.before.py`, `NN_pass.after.py`, `NN_pass.diff`; `passes.txt` (op counts of each pass),
    `rejected.txt`, `summary.txt`, `summary.json`, `timings.json`, and `index.html`. For each program `program.txt`,
    `program.json`, `schedule.svg` and `trace.json`: in `directory` for one program, else in a folder with its bucket's
    name. `layers`: layers of the graphs to write (default: all). `timings`: measured steps and compiled kernels. The
    page has the steps' and passes' seconds only with `show_timings`, the kernels' resources only with `show_resources`
    (or `show_timings`). `ledger`: pass -> relative error. `gpu`: GPU of the estimates. Files of earlier dumps are
    replaced or removed.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.iterdir():
        if re.fullmatch(r"\d\d_\w+\.(before\.py|after\.py|diff)", stale.name):
            stale.unlink()
    written: list[Path] = []

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)

    for number, record in enumerate(records):
        stem = f"{number:02d}_{record.name}"
        record = (
            record
            if layers is None
            else replace(record, before=text_of(record.lines_before, layers), after=text_of(record.lines_after, layers))
        )
        write(root / f"{stem}.before.py", record.before)
        write(root / f"{stem}.after.py", record.after)
        write(root / f"{stem}.diff", pass_diff(record))
    write(root / "passes.txt", pass_table(records))
    write(root / "rejected.txt", refusals(records) or "No pass refused anything.\n")
    write(root / "summary.txt", summary_text(records, programs, options, gpu))
    write(root / "summary.json", json.dumps(summary(records, programs, options), indent=1) + "\n")
    timings = timings or Timings()
    measured = replace(timings, passes={record.name: record.seconds for record in records})
    write(root / "timings.json", json.dumps(measured.to_json(), indent=1) + "\n")
    shown = measured if show_timings else Timings(resources=timings.resources) if show_resources else None
    data = page_data(
        records,
        programs,
        title=title,
        version=__version__,
        options=options,
        layers=layers,
        timings=shown,
        ledger=ledger,
        gpu=gpu,
    )
    write(root / "index.html", render(data))
    for program in programs:
        folder = root if len(programs) == 1 else root / program.name
        timing = estimate(program, gpu=gpu)
        write(folder / "program.txt", program_text(program, gpu))
        write(folder / "program.json", json.dumps(program.to_json(), indent=1, allow_nan=False) + "\n")
        write(folder / "schedule.svg", schedule_svg(program, timing))
        write(folder / "trace.json", json.dumps(trace(program, gpu=gpu), indent=1) + "\n")
    return written


def pass_diff(record: PassRecord) -> str:
    """Return a unified diff of the graphs before and after one pass; empty if they are equal."""
    before, after = record.before.splitlines(), record.after.splitlines()
    names = f"before {record.name}", f"after {record.name}"
    lines = difflib.unified_diff(before, after, *names, n=2, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def summary_text(
    records: Sequence[PassRecord], programs: Sequence[Program], options: CompileOptions | None, gpu: Gpu = H200
) -> str:
    """Return options, the pass table, and one line for each program."""
    parts = []
    if options is not None:
        values = sorted(options.to_dict().items())
        parts.append("options\n" + "".join(f"  {name} = {value!r}\n" for name, value in values))
    parts.append(pass_table(records))
    if programs:
        rows = [("program", "steps", "main", "side", "waits", "arena MiB", "unshared MiB", "estimate us")]
        for program in programs:
            side = sum(step.stream == "side" for step in program.steps)
            waits = sum(len(step.waits) for step in program.steps)
            end = max((placed.end for placed in estimate(program, gpu=gpu)), default=0.0)
            counts = (len(program.steps), len(program.steps) - side, side, waits)
            rows.append(
                (  # type: ignore[arg-type]
                    program.name,
                    *map(str, counts),
                    _mib(program.arena_bytes),
                    _mib(unshared_bytes(program)),
                    f"{end * 1e6:.1f}",
                )
            )
        parts.append(columns(rows, right=range(1, 8)))
    return "\n".join(parts)


def summary(
    records: Sequence[PassRecord], programs: Sequence[Program], options: CompileOptions | None
) -> dict[str, Any]:
    """Return the summary for `sidestream inspect diff`: options, passes with op counts and refusals, programs."""
    fields = ("name", "tier", "matches", "rejected", "ops_before", "ops_after")
    passes = [{name: getattr(record, name) for name in fields} for record in records]
    return {
        "version": __version__,
        "options": options and options.to_dict(),
        "passes": passes,
        "programs": [program.name for program in programs],
    }


def program_text(program: Program, gpu: Gpu = H200) -> str:
    """Return a table of the steps and one of the buffers."""
    buffers, timing = program.by_name, estimate(program, gpu=gpu)
    rows = [("step", "lane", "op", "name", "results", "arguments", "waits", "rec", "SMs", "PDL", "bytes", "us")]
    for step, placed in zip(program.steps, timing, strict=True):
        outs = ", ".join(f"{view.buffer}: {describe_view(view, buffers)}" for view in step.outs) or "(in place)"
        keywords = (f"{name}={describe(value)}" for name, value in step.kwargs)
        arguments = ", ".join([*map(describe, step.args), *keywords])
        rows.append(
            (
                str(step.index),
                step.stream,
                step.op,
                step.name,
                outs,
                arguments,
                ",".join(map(str, step.waits)),
                "yes" if step.records else "",
                str(step.sm_budget or "all"),
                "yes" if step.pdl else "",
                f"{step_bytes(program, step):,}",
                f"{(placed.end - placed.start) * 1e6:.2f}",
            )
        )
    memory = [("buffer", "kind", "dtype", "shape", "bytes", "offset", "life", "from")]
    for buffer in program.buffers:
        life = "" if buffer.life[0] < 0 else f"{buffer.life[0]}..{buffer.life[1]}"
        offset = "" if buffer.offset is None else f"{buffer.offset:,}"
        shape = ", ".join(map(str, buffer.shape))
        source = str(program.recipes.get(buffer.name, ""))
        memory.append(
            (
                buffer.name,
                buffer.kind,
                short_dtype(buffer.dtype),
                f"[{shape}]",
                f"{buffer.nbytes:,}",
                offset,
                life,
                source,
            )
        )
    outputs = ", ".join(describe(value) for value in program.outputs)
    head = (
        f"{program.name}: {len(program.steps)} steps, arena {program.arena_bytes:,} bytes "
        f"({unshared_bytes(program):,} without sharing), returns {outputs}\n"
    )
    return "\n".join(
        [
            head,
            *([program.passes] if program.passes else []),
            columns(rows, right=(0, 8, 10, 11)),
            columns(memory, right=(4, 5)),
        ]
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"
