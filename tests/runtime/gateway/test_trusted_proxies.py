"""X-Forwarded-For: only a proxy that the operator names may say who the client is."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.addresses import parse_networks
from sidestream.runtime.gateway.connections import ConnectionPool
from sidestream.runtime.gateway.metrics.access_log import AccessLog
from sidestream.runtime.gateway.settings import GatewaySettings
from support import gateway
from support.gateway import FakeEngines, listening


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: client addresses in the access log of requests with these headers."""

    def ask(trusted: list[str], *headers: dict[str, str]) -> list[str]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        access = AccessLog(log)
        monkeypatch.setattr(gateway, "Metrics", lambda: gateway_metrics(access))
        with listening(FakeEngines(), trusted_proxies=parse_networks(trusted)) as (host, port):
            for given in headers:
                assert httpx.get(f"http://{host}:{port}/version", headers=given, timeout=60).status_code == 200
            until = time.monotonic() + 60
            while len(log.read_text().splitlines()) < len(headers):
                assert time.monotonic() < until
                time.sleep(0.01)
        access.close()
        return [json.loads(line)["client"] for line in log.read_text().splitlines()]

    metrics = gateway.Metrics

    def gateway_metrics(access: AccessLog) -> Any:
        made = metrics()
        monkeypatch.setattr(made, "on_http_exchange", access.on_http_exchange)
        return made

    return ask


FORGED = {"X-Forwarded-For": "203.0.113.9"}


def test_nobody_is_believed_by_default(clients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own default is no option of the gateway
    others = {"X-Real-IP": "203.0.113.9", "Forwarded": "for=203.0.113.9", "X-Forwarded-Proto": "https"}
    assert clients([], FORGED, others) == ["127.0.0.1"] * 2


def test_a_trusted_proxy_names_the_client_and_a_client_cannot_name_itself(clients: Any) -> None:
    chain = {"X-Forwarded-For": "198.51.100.1, 203.0.113.9"}  # the client sent the first, the proxy added the second
    two_proxies = {"X-Forwarded-For": "203.0.113.9, 127.0.0.2"}
    assert clients(["127.0.0.0/8"], FORGED, chain, two_proxies, {}) == ["203.0.113.9"] * 3 + ["127.0.0.1"]
    assert clients(["10.0.0.7"], FORGED) == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["10.0.0.7", "::ffff:10.0.0.7"])
def test_the_connections_of_a_trusted_proxy_are_those_of_many_clients(host: str) -> None:
    settings = GatewaySettings(max_connections=4, trusted_proxies=parse_networks(["10.0.0.0/8"]))
    pool = ConnectionPool.of_settings(settings)
    for peer in range(4):
        assert pool.make_room(host) is None
        connection: Any = peer
        pool.add(connection, host)
        pool.set_busy(connection)
    refusal = pool.make_room(host)
    assert refusal is not None and refusal.status == 503


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.1/8", "10.0.0.0/33", "*", ""])
def test_a_wrong_network_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"--trusted-proxies: .* give an address such as"):
        parse_networks([wrong])
