"""Pages of other origins cannot change the adapters of a server without keys, in a real browser."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.chromium import browser, needs_chromium
from support.gateway import FakeEngines
from support.gateway_served import served

pytestmark = needs_chromium
LOAD = {"lora_name": "stolen", "lora_path": "/tmp/anything"}
JSON = "{'Content-Type': 'application/json'}"
REFUSED = re.compile(r'sidestream_http_requests_total\{.*method="POST".*status="403"')
BODIES = {
    "a blob without a type": "new Blob([BODY])",
    "text": "new Blob([BODY], {type: 'text/plain'})",
    "form": "new URLSearchParams({body: BODY})",
    "beacon": None,
}


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another page</title>")

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextmanager
def other_server() -> Iterator[int]:
    """The port of a server of another page."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@pytest.mark.parametrize("host", ["pages.example", "127.0.0.1", "localhost"])
def test_no_simple_request_of_another_page_has_an_effect(host: str) -> None:
    engines = FakeEngines()
    with served(engines) as url, other_server() as port, browser() as chromium:
        page = chromium.open(f"http://{host}:{port}/")
        page.wait("document.title === 'another page'")
        page.run(f"globalThis.BODY = {json.dumps(json.dumps(LOAD))}")
        for path in ("v1/load_lora_adapter", "v1/unload_lora_adapter"):
            for kind, body in BODIES.items():
                if body is None:
                    sent = page.run(f"navigator.sendBeacon({url + path!r}, new Blob([BODY]))")
                    assert sent, kind
                    continue
                options = f"{{method: 'POST', mode: 'no-cors', body: {body}}}"
                told = page.run(f"fetch({url + path!r}, {options}).then((answer) => answer.type, (error) => 'failed')")
                assert told in ("opaque", "failed"), (kind, told)
            read = page.run(
                f"fetch({url + path!r}, {{method: 'POST', headers: {JSON}, body: BODY}})"
                ".then((answer) => answer.status, (error) => 'failed')"
            )
            assert read in (403, "failed")
        assert engines.calls == [], "an adapter was changed"

        own = chromium.open(url)
        own.wait("document.title.includes('Sidestream')")
        status = own.run(
            f"fetch('/v1/load_lora_adapter', {{method: 'POST', headers: {JSON}, body: {json.dumps(json.dumps(LOAD))}}})"
            ".then((answer) => answer.status)"
        )
        assert status == 200 and engines.calls == [("load", "stolen", "/tmp/anything", False)], "its own page may"
        counted = own.run("fetch('/metrics').then((answer) => answer.text())")
        refused = sum(float(line.split()[-1]) for line in counted.splitlines() if REFUSED.match(line))
        assert refused >= 2 * len(BODIES), f"the requests of the other page arrived:\n{counted}"


def test_a_name_that_resolves_to_this_machine_reads_nothing() -> None:
    with served(FakeEngines()) as url, browser() as chromium:
        port = url.rstrip("/").rpartition(":")[2]
        page = chromium.open(f"http://rebound.example:{port}/")
        page.wait("document.body?.innerText.includes('not a name of this server')")
        assert page.run("fetch('/v1/models').then((answer) => answer.status)") == 421
