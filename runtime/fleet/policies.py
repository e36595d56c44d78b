"""What Ray Serve calls: the number of engines, by their load, and the replica of a call.

Ray ships this module's code by value to its controller and to the processes that hold a handle. So it holds no state,
and imports nothing but Ray and the ingress, which such a process has imported.
"""

import math
from typing import TYPE_CHECKING, Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .ingress import publish

if TYPE_CHECKING:
    from .options import FleetOptions

METRICS_SECONDS = 1.0
LOOK_BACK_SECONDS = 4.0


class LoadPolicy:
    """Autoscaling policy that Ray's controller calls with the results of `Engine.record_autoscaling_stats`.

    Ray itself applies minimum, maximum and delays, and starts a first engine for a waiting request.

    target_requests   open requests per engine
    target_tokens     tokens in flight per engine; None: not used
    """

    def __init__(self, target_requests: float, target_tokens: float | None) -> None:
        self._targets = {"requests": target_requests, "tokens": target_tokens}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of engines."""
        metrics = context.aggregated_metrics or {}
        wanted = [
            math.ceil(sum(metrics.get(name, {}).values()) / target)
            for name, target in self._targets.items()
            if target is not None
        ]
        waiting = math.ceil(min(1.0, context.total_queued_requests or 0.0))
        return max(*wanted, waiting), {}


def autoscaling_config(options: "FleetOptions") -> dict[str, Any]:
    """Return Ray's `autoscaling_config` of the engines."""
    return {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": options.scale_up_seconds,
        "downscale_delay_s": options.idle_seconds,
        "downscale_to_zero_delay_s": options.idle_seconds,
        "look_back_period_s": LOOK_BACK_SECONDS,
        "metrics_interval_s": METRICS_SECONDS,  # Ray requires less than look_back_period_s, despite the environment
        "policy": {
            "policy_function": f"{LoadPolicy.__module__}:{LoadPolicy.__name__}",
            "policy_kwargs": {"target_requests": options.target_requests, "target_tokens": options.target_tokens},
        },
    }


class EngineRouter(RequestRouter):
    """Publishes the replicas for the gateway's router.

    It routes only `wake`, which any replica may serve.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Receive all replicas that accept requests, without those that start or stop. Called by Ray."""
        super().update_replicas(replicas)
        publish(
            {
                replica.replica_id.unique_id: replica.replica_metadata["address"]
                for replica in replicas
                if "address" in replica.replica_metadata
            }
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas."""
        return [candidate_replicas]
