"""How many engines a fleet should have: by open requests and tokens in flight, never by processor time.

Ray's controller calls it with what the engines told (`Engine.record_autoscaling_stats`), and applies the least and the
most, the seconds that more or fewer have to be wanted, and the start of a first engine for a request that waits.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class LoadPolicy:
    """target_requests   open requests for each engine
    target_tokens     tokens in flight for each engine; None: they do not count
    """

    def __init__(self, target_requests: float, target_tokens: float | None) -> None:
        self._targets = {"requests": target_requests, "tokens": target_tokens}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of engines wanted."""
        told = context.aggregated_metrics or {}
        wanted = [
            math.ceil(sum(told.get(name, {}).values()) / target)
            for name, target in self._targets.items()
            if target is not None
        ]
        waiting = math.ceil(min(1.0, context.total_queued_requests or 0.0))
        return max(*wanted, waiting), {}
