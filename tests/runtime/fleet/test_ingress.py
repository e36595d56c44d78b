"""The gateway of a fleet follows the list of replicas."""

import pytest


class Recorded:
    """Records what the router is told."""

    def __init__(self) -> None:
        self.engines: dict[str, str] = {}

    def add(self, name: str, address: str) -> None:
        assert name not in self.engines
        self.engines[name] = address

    def remove(self, name: str) -> None:
        del self.engines[name]


@pytest.mark.usefixtures("secured")
def test_a_replica_with_another_address_is_another_engine() -> None:
    from sidestream.runtime.fleet.ingress import Ingress

    ingress = Ingress.__new__(Ingress)
    router = Recorded()
    ingress._router, ingress._names = router, {}  # type: ignore[assignment]
    for replicas in ({"a": "tcp://h:1", "b": "tcp://h:2"}, {"a": "tcp://h:3", "c": "tcp://h:2"}, {}):
        ingress._update_router(replicas)
        assert router.engines == replicas
