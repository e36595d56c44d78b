"""Ray Serve's request router for engines: it tells the gateway's router which replicas there are.

Requests do not go through it, only two calls: the one that wakes a fleet of none, which any replica may take, and
`fetch`, which names the replica that has to.
Ray ships this module's code to the processes that hold a handle, so what they share lies in `members`.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .members import tell


class EngineRouter(RequestRouter):
    """See the module."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this with all replicas that take requests: one that starts is not among them, nor one that is
        about to stop.
        """
        super().update_replicas(replicas)
        tell(
            {
                replica.replica_id.unique_id: replica.replica_metadata["address"]
                for replica in replicas
                if "address" in replica.replica_metadata
            }
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that the call names, or all as they come."""
        named = None if pending_request is None else pending_request.kwargs.get("replica")
        if named is None:
            return [candidate_replicas]
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == named]]
