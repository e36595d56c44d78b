"""Ray Serve's request router for engines: publishes the replicas for the gateway's router.

It routes only two calls: `wake`, which any replica may serve, and `fetch`, which names its replica. Ray sends this
module's code by value to the processes that have a handle, so shared state is in `replica_list`.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .replica_list import publish


class EngineRouter(RequestRouter):
    """See the module."""

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
        """Return the replica that the call names, or all."""
        name = None if pending_request is None else pending_request.kwargs.get("replica")
        if name is None:
            return [candidate_replicas]
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == name]]
