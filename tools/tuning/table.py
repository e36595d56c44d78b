"""The table file of a GPU: read entries, set one, write it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .jobs import Job, sparse

if TYPE_CHECKING:
    from ...ops.linear.kernel_selection import LinearConfig


def sections(table: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a table, without its description."""
    return {op: shapes for op, shapes in table.items() if op.startswith("linear_")}


def has_entry(table: dict[str, Any], job: Job) -> bool:
    """Return whether a table has this entry in the section of the job's dtype."""
    from ...ops.linear.kernel_selection import table_op

    return any(
        (shape["n"], shape["k"]) == (job.n, job.k) and str(job.tokens) in shape["tokens"]
        for shape in table.get(table_op("linear_8bit", job.int8), ())
    )


def set_entry(table: dict[str, Any], op: str, job: Job, config: "LinearConfig | None") -> None:
    """Set one entry of `op` in the section of the job's dtype, or remove it."""
    from ...ops.linear.kernel_selection import table_op

    shapes = table.setdefault(table_op(op, job.int8), [])
    shape = next((shape for shape in shapes if (shape["n"], shape["k"]) == (job.n, job.k)), None)
    if shape is None:
        shape = {"layer": job.layer, "n": job.n, "k": job.k, "tokens": {}}
        shapes.append(shape)
    shape["tokens"].pop(str(job.tokens), None)
    if config is not None:
        shape["tokens"][str(job.tokens)] = sparse(config)
    shape["tokens"] = dict(sorted(shape["tokens"].items(), key=lambda entry: int(entry[0])))


def write(path: Path, table: dict[str, Any]) -> None:
    """Write the table as JSON, one entry per line."""
    found = sections(table)
    heads = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key not in found]
    ops = []
    for op, shapes in found.items():
        blocks = []
        for shape in shapes:
            head = ", ".join(
                f"{json.dumps(key)}: {json.dumps(value)}" for key, value in shape.items() if key != "tokens"
            )
            entries = ",\n".join(
                f"      {json.dumps(tokens)}: {json.dumps(config)}" for tokens, config in shape["tokens"].items()
            )
            blocks.append("    {" + head + ', "tokens": {\n' + entries + "\n    }}")
        ops.append(f"  {json.dumps(op)}: [\n" + ",\n".join(blocks) + "\n  ]")
    path.write_text("{\n" + ",\n".join([*heads, *ops]) + "\n}\n")
