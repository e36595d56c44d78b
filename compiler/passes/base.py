"""Arguments and results of passes, and the loop that most of them share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx

from ...ops.core.device import H200_SMS
from ..graph.nodes import Refused
from ..options import CompileOptions

__all__ = ["Context", "PassReport", "Refused", "rewrite_each"]


@dataclass
class PassReport:
    """The number of matches of a pass, and one line for each near-miss."""

    matches: int
    rejected: list[str] = field(default_factory=list)


@dataclass
class Context:
    """The options and the GPU's number of SMs: a pass reads only these and the graph."""

    options: CompileOptions
    sm_count: int = H200_SMS


def rewrite_each(nodes: Iterable[fx.Node], rewrite: Callable[[fx.Node], object]) -> PassReport:
    """Call `rewrite` for each node and count the matches; a Refused exception is the reason for a near-miss."""
    report = PassReport(0)
    for node in nodes:
        try:
            rewrite(node)
            report.matches += 1
        except Refused as reason:
            report.rejected.append(f"{node.name}: {reason}")
    return report
