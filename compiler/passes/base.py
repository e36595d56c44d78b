"""What every pass takes and returns."""

from dataclasses import dataclass, field

from ...ops.core.device import H200_SMS
from ..options import CompileOptions


@dataclass
class PassReport:
    """How often a pass matched, and one line for each near-miss that it left alone."""

    matches: int
    rejected: list[str] = field(default_factory=list)


@dataclass
class Context:
    """What passes may know besides the graph: the options and the GPU's number of SMs; nothing of the model."""

    options: CompileOptions
    sm_count: int = H200_SMS
