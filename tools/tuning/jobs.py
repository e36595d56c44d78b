"""Entries of the table to tune, timed configurations, and their text."""

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ...compiler.options import DEFAULT_PRECISION

if TYPE_CHECKING:
    from ...ops.linear.kernel_selection import LinearConfig


@dataclass(frozen=True)
class Job:
    """One entry of the table: a linear's weight [N, K], a token count, and the operands' dtype (`int8` or `fp8`)."""

    layer: str
    n: int
    k: int
    tokens: int
    dtype: str = DEFAULT_PRECISION

    @property
    def int8(self) -> bool:
        """Return whether the operands are integers."""
        return self.dtype == "int8"


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
