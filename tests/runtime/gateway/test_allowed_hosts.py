"""Host headers: a page whose name resolves to this machine (DNS rebinding) is answered nothing."""

import argparse
import http.client
from collections.abc import Mapping
from typing import Any

import pytest
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.tools.options.gateway import add_gateway_options, gateway_settings
from support.gateway import FakeEngines, listening


def status(
    place: tuple[str, int],
    host: str | None,
    path: str = "/v1/models",
    method: str = "GET",
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Return status and body of a request with this Host header (None: without one)."""
    connection = http.client.HTTPConnection(*place, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {
        "Host": host,
        "Content-Type": body and "application/json",
        "Content-Length": body and str(len(body)),
        **(headers or {}),
    }.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


OURS = [
    "localhost",
    "localhost:8000",
    "LOCALHOST.",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.9.8.7:1",
    "[::1]",
    "[::1]:8000",
    "10.0.0.1:8000",
    "[fd00::2]:8000",
    None,
]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "10.0.0",
    "[::2",
    "[evil.example]",
    "a:b:c",
    "evil@localhost",
]


@pytest.mark.parametrize(("named", "ours", "others"), [
    (None, OURS, OTHERS),
    (["gateway.example"], [*OURS, "gateway.example", "Gateway.Example:443"], [*OTHERS, "x.gateway.example"]),
    (["*"], [*OURS, *OTHERS], []),
])  # fmt: skip
def test_a_server_on_the_loopback_has_names(named: list[str] | None, ours: list[str | None], others: list[str]) -> None:
    with listening(FakeEngines(), allowed_hosts=named) as place:
        for host in ours:
            assert status(place, host)[0] == 200, host
        for host in others:
            code, text = status(place, host)
            assert code == 421 and "--allowed-hosts" in text and "base" not in text, host


def test_a_rebound_page_reads_and_changes_nothing() -> None:
    engines = FakeEngines()
    with listening(engines) as place:
        for path in ("/", "/health", "/metrics", "/openapi.json", "/v1/models", "/nowhere"):
            assert status(place, "evil.example", path)[0] == 421
        assert status(place, "evil.example", "/v1/unload_lora_adapter", "POST", b'{"lora_name":"pirate"}')[0] == 421
        asks = {"Origin": "http://localhost", "Access-Control-Request-Method": "POST"}
        for headers in (asks, {"Origin": "http://localhost"}):
            code, text = status(place, "evil.example", "/v1/completions", "OPTIONS", headers=headers)
            assert code == 421 and "--allowed-hosts" in text
        assert status(place, "localhost", "/v1/completions", "OPTIONS", headers=asks)[0] == 200
        assert engines.calls == []
        assert status(place, "localhost", "/v1/unload_lora_adapter", "POST", b'{"lora_name":"pirate"}')[0] == 200


def test_a_server_for_other_machines_answers_to_every_name_unless_they_are_given() -> None:
    with listening(FakeEngines(), host="0.0.0.0", insecure=True) as (_, port):
        assert status(("127.0.0.1", port), "gpu-host:8000")[0] == 200
    with listening(FakeEngines(), host="0.0.0.0", insecure=True, allowed_hosts=["gpu-host"]) as (_, port):
        assert status(("127.0.0.1", port), "gpu-host:8000")[0] == status(("127.0.0.1", port), "localhost")[0] == 200
        assert status(("127.0.0.1", port), "evil.example")[0] == 421


def settings(*flags: str) -> GatewaySettings:
    parser = argparse.ArgumentParser()
    add_gateway_options(parser, ["--keys"])
    options = parser.parse_args(["--usage-log", "none", *flags])
    made: GatewaySettings = gateway_settings(argparse.Namespace(**vars(options), drain_seconds=1.0))
    return made


def test_the_flag_takes_names_and_addresses() -> None:
    assert settings().allowed_hosts is None
    assert settings("--allowed-hosts", "Gateway.Example", "10.0.0.7", "[fd00::1]").allowed_hosts == [
        "gateway.example",
        "10.0.0.7",
        "fd00::1",
    ]
    assert settings("--allowed-hosts", "*").allowed_hosts == ["*"]
    for wrong in ("https://gateway.example", "gateway.example:8000", "*.example", "", "a b"):
        with pytest.raises(ValueError, match=r"--allowed-hosts: .*without a scheme and a port, .* \* for all"):
            settings("--allowed-hosts", wrong)


@pytest.mark.parametrize("host", ["localhost.evil.example", "127.evil.example", "::1.evil.example"])
def test_an_address_that_only_looks_like_the_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other machines"):
        settings("--host", host)
