"""Differences of two dumps: options, passes, kernels, bytes, estimated time.

Reads `summary.json` and each `program.json`.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cost.bytes_and_flops import step_bytes
from ..cost.estimate import estimate, floor_seconds, total_seconds
from ..pass_records import columns
from ..program.buffers import ProgramError
from ..program.program import Program


class DumpError(ValueError):
    """A directory contains no dump, or a damaged one."""


@dataclass(frozen=True)
class Dump:
    """A dump's machine-readable part."""

    version: str
    options: Mapping[str, Any]
    passes: Mapping[str, Mapping[str, Any]]
    programs: Mapping[str, Program]


def read_dump(directory: str | Path) -> Dump:
    """Read a directory of `dump`. Raises DumpError, and ProgramError for a malformed program."""
    root = Path(directory)
    path = root / "summary.json"
    if not path.is_file():
        raise DumpError(
            f"{root} contains no dump ({path.name} is missing); write one with `sidestream inspect dump -o {root}`"
        )
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        passes = {entry["name"]: entry for entry in summary["passes"]}
        names = list(summary["programs"])
        places = [root / "program.json"] if len(names) == 1 else [root / name / "program.json" for name in names]
        programs = [_read_program(place) for place in places]
        by_name = {program.name: program for program in programs}
        return Dump(summary["version"], summary["options"] or {}, passes, by_name)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DumpError(
            f"{path} is not a valid summary ({type(error).__name__}: {error}); dump again with this release"
        ) from error


def _read_program(path: Path) -> Program:
    try:
        return Program.decoded(path.read_bytes())
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from error


def difference(first: Dump, second: Dump) -> dict[str, Any]:
    """Return the differences as plain values, without equal parts."""
    return {
        "version": None if first.version == second.version else [first.version, second.version],
        "options": {
            name: [first.options.get(name), second.options.get(name)]
            for name in sorted({*first.options, *second.options})
            if first.options.get(name) != second.options.get(name)
        },
        "passes": {
            name: found
            for name in {**first.passes, **second.passes}
            if (found := _pass(first.passes.get(name), second.passes.get(name)))
        },
        "programs": {
            name: found
            for name in {**first.programs, **second.programs}
            if (found := _program(first.programs.get(name), second.programs.get(name)))
        },
    }


def _pass(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any]:
    if first is None or second is None:
        return {"only_in": "second" if first is None else "first"}
    found: dict[str, Any] = {}
    if first["matches"] != second["matches"]:
        found["matches"] = [first["matches"], second["matches"]]
    old, now = Counter(first["rejected"]), Counter(second["rejected"])
    gone, new = old - now, now - old
    if gone or new:
        found["rejected"] = {"gone": sorted(gone.elements()), "new": sorted(new.elements())}
    changes = [_moves(entry) for entry in (first, second)]
    if changes[0] != changes[1]:
        found["kernels"] = changes
    return found


def _moves(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return op -> number of calls that a pass added; negative: removed."""
    change = Counter(entry["ops_after"])
    change.subtract(entry["ops_before"])
    return {op: count for op, count in sorted(change.items()) if count}


def _program(first: Program | None, second: Program | None) -> dict[str, Any]:
    if first is None or second is None:
        return {"only_in": "second" if first is None else "first"}
    if first == second:
        return {}
    before, after = _figures(first), _figures(second)
    kernels = Counter(_kernel(step) for step in second.steps)
    kernels.subtract(_kernel(step) for step in first.steps)
    return {
        **{name: [before[name], after[name]] for name in before if before[name] != after[name]},
        "kernels_changed": {name: count for name, count in sorted(kernels.items()) if count},
    }


def _kernel(step: Any) -> str:
    return step.op if step.stream == "main" else f"{step.op} ({step.stream})"


def _figures(program: Program) -> dict[str, float]:
    return {
        "kernels": len(program.steps),
        "side_kernels": sum(step.stream == "side" for step in program.steps),
        "waits": sum(len(step.waits) for step in program.steps),
        "bytes": sum(step_bytes(program, step) for step in program.steps),
        "arena_bytes": program.arena_bytes,
        "floor_us": round(floor_seconds(program) * 1e6, 3),
        "estimated_us": round(total_seconds(estimate(program)) * 1e6, 3),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Return `difference`'s values as text."""
    parts = []
    if found["version"]:
        parts.append("version: {} -> {}\n".format(*found["version"]))
    if found["options"]:
        parts.append(
            columns(
                [
                    ("option", "first", "second"),
                    *((name, repr(one), repr(two)) for name, (one, two) in found["options"].items()),
                ]
            )
        )
    if found["passes"]:
        parts.append("".join(f"pass {name}: {_pass_text(change)}\n" for name, change in found["passes"].items()))
    for name, change in found["programs"].items():
        parts.append(
            f"program {name}: only in the {change['only_in']} dump\n"
            if "only_in" in change
            else _program_text(name, change)
        )
    return "\n".join(parts) or "The dumps show the same compilation.\n"


def _pass_text(change: Mapping[str, Any]) -> str:
    if "only_in" in change:
        return f"only in the {change['only_in']} dump"
    words = []
    if "matches" in change:
        words.append("{} -> {} matches".format(*change["matches"]))
    if "kernels" in change:
        sides = (", ".join(f"{count:+d} {op}" for op, count in side.items()) for side in change["kernels"])
        words.append(f"kernels {' -> '.join(side or 'no change' for side in sides)}")
    lines = [
        f"\n  {word} refused: {reason}"
        for word, key in (("no longer", "gone"), ("newly", "new"))
        for reason in change.get("rejected", {}).get(key, ())
    ]
    return "; ".join(words or ["other refusals"]) + "".join(lines)


def _program_text(name: str, change: Mapping[str, Any]) -> str:
    rows = [(f"program {name}", "first", "second", "change")]
    for key, value in change.items():
        if key != "kernels_changed":
            one, two = value
            rows.append((key.replace("_", " "), f"{one:,}", f"{two:,}", f"{two / one - 1:+.1%}" if one else ""))
    rows.extend((f"  {op}", "", "", f"{count:+d}") for op, count in change["kernels_changed"].items())
    return (
        columns(rows, right=(1, 2, 3))
        if len(rows) > 1
        else f"program {name}: other arguments, buffers or order; the same kernels, bytes and estimate\n"
    )
