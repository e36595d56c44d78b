"""The table file of a GPU: its entries, timed configurations, and how to set and write them."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compiler.options import DEFAULT_PRECISION

if TYPE_CHECKING:
    from ...ops.linear.kernel_selection import LinearConfig


@dataclass(frozen=True)
class Job:
    """One entry of the table: a linear's weight [N, K], a token count, and the operands' dtype (`int8` or `fp8`).

    experts, top_k  experts of the layer with a weight each, and those of a token; 0: no experts
    """

    layer: str
    n: int
    k: int
    tokens: int
    dtype: str = DEFAULT_PRECISION
    experts: int = 0
    top_k: int = 0

    @property
    def int8(self) -> bool:
        """Return whether the operands are integers."""
        return self.dtype == "int8"

    @property
    def op(self) -> str:
        """Return the op whose section has the entry."""
        return "grouped_linear_8bit" if self.experts else "linear_8bit"

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a token and one of its experts."""
        return self.tokens * self.top_k

    @property
    def rows(self) -> int:
        """Return the rows under which the table has the entry: tokens, or pairs."""
        from ...ops.linear.kernel_selection import padded_tokens

        return padded_tokens(self.pairs) if self.experts else self.tokens


@dataclass(frozen=True)
class Timing:
    """A configuration with right results: microseconds, and the error relative to the exact product."""

    config: "LinearConfig"
    us: float
    error: float


def show(config: "LinearConfig") -> str:
    """Return the fields that differ from the defaults."""
    return " ".join(f"{name}={value}" if name != "kernel" else value for name, value in sparse(config).items())


def sparse(config: "LinearConfig") -> dict[str, Any]:
    """Return the fields for the table."""
    from ...ops.linear.kernel_selection import LinearConfig

    if config.kernel == "scaled_mm":
        return {"kernel": "scaled_mm"}
    optional = {
        field.name: field.default
        for field in fields(LinearConfig)
        if field.name in ("block_k", "ctas", "split", "max_registers", "promote", "parts")
    }
    return {name: value for name, value in asdict(config).items() if name not in optional or value != optional[name]}


def sections(table: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a table, without its description."""
    return {op: shapes for op, shapes in table.items() if op.startswith(("linear_", "grouped_linear_"))}


def has_entry(table: dict[str, Any], job: Job) -> bool:
    """Return whether a table has this entry in the section of the job's dtype."""
    from ...ops.linear.kernel_selection import table_op

    return any(
        (shape["n"], shape["k"]) == (job.n, job.k) and str(job.rows) in shape["tokens"]
        for shape in table.get(table_op(job.op, job.int8), ())
    )


def set_entry(table: dict[str, Any], op: str, job: Job, config: "LinearConfig | None") -> None:
    """Set one entry of `op` in the section of the job's dtype, or remove it."""
    from ...ops.linear.kernel_selection import table_op

    shapes = table.setdefault(table_op(op, job.int8), [])
    shape = next((shape for shape in shapes if (shape["n"], shape["k"]) == (job.n, job.k)), None)
    if shape is None:
        shape = {"layer": job.layer, "n": job.n, "k": job.k, "tokens": {}}
        shapes.append(shape)
    shape["tokens"].pop(str(job.rows), None)
    if config is not None:
        shape["tokens"][str(job.rows)] = sparse(config)
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
