"""What every pass takes and returns."""
from dataclasses import dataclass, field

from ..options import CompileOptions


@dataclass
class PassReport:
    """How often a pass matched, and one line for each near-miss that it left alone."""

    matches: int
    rejected: list[str] = field(default_factory=list)


@dataclass
class Context:
    """What passes may know beside the graph: the options; nothing of the model."""

    options: CompileOptions
