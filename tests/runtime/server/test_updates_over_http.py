"""PUT /v1/adapters/{name}: updates of all engines over HTTP, and what is refused without a change."""

import concurrent.futures
import http.client
import json
import re
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sidestream.runtime.client.client import Client
from support.serving import GUARD, free_port, serve, serve_fake
from support.tiny import AdapterSpec, oracle_greedy, tiny_adapters, tiny_llama

from ..test_llm_updates import stored
from .test_updates import content, settings, with_header

PROMPT = list(range(5, 25))
TOKENS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(base):
    return tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8, targets="all-linear"), AdapterSpec(rank=20)])


@pytest.fixture(scope="module")
def expected(base, adapters):
    return [oracle_greedy(base, path, PROMPT, TOKENS) for path in adapters[:2]]


@pytest.fixture(scope="module")
def server(base, adapters, tmp_path_factory):
    """Two engines."""
    with serve(settings(base, adapters), tmp_path_factory.mktemp("log") / "log", engines=2) as server:
        yield server


@pytest.fixture(scope="module")
def address(server, adapters):
    address = address_of(server)
    until(lambda: put(address, "ready", content(adapters[0]))[0] != 503)  # both engines have loaded
    return address


def address_of(server):
    server.await_text("answering HTTP at ")
    return urlsplit(re.search(r"answering HTTP at (\S+)", server.log.read_text())[1]).netloc


def until(condition):
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def put(address, path, data, **headers):
    """Send an update; return status and body."""
    connection = http.client.HTTPConnection(address, timeout=GUARD)
    try:
        connection.request("PUT", f"/v1/adapters/{path}", data, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def answer(address, name):
    body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection(address, timeout=GUARD)
    data = json.dumps(body | {"return_token_ids": True})
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply["choices"][0]["token_ids"] if "choices" in reply else reply["error"]["code"]


def test_all_engines_have_the_update(server, address, adapters, expected):
    for version, path, tokens in zip((1, 2, 7), (*adapters[:2], adapters[0]), (*expected, expected[0]), strict=True):
        query = "?version=7&inflight=switch" if version == 7 else ""
        status, made = put(address, "fresh" + query, content(path))
        assert status == 200, made
        assert (made["name"], made["version"], made["engines"], made["failed"]) == ("fresh", version, 2, {})
        assert answer(address, "fresh") == answer(address, f"fresh@{version}") == tokens
    folder = Path(server.address.removeprefix("ipc://")).parent
    for index in range(2):
        with Client(f"ipc://{folder}/engine-{index}.sock", connect_timeout=GUARD) as client:
            assert {each.content for each in client.list_adapters() if each.name == "fresh"} == {made["content"]}
            assert client.generate([PROMPT], adapter="fresh@2")[0].outputs[0].token_ids
    status, refused = put(address, "fresh?version=7", content(adapters[1]))
    assert (status, refused["error"]["code"]) == (409, "version_conflict")
    assert "version=7" in refused["error"]["message"]
    assert answer(address, "fresh") == expected[0]
    assert put(address, "fresh", content(adapters[1]))[1]["version"] == 8


def test_an_engine_that_refuses_is_named_and_gets_no_requests(server, address, adapters, expected):
    assert put(address, "partly", content(adapters[0]))[1]["version"] == 1
    folder = Path(server.address.removeprefix("ipc://")).parent
    with Client(f"ipc://{folder}/engine-1.sock", connect_timeout=GUARD) as client:
        client.update_adapter("partly", *stored(adapters[0]), version=9)
        status, made = put(address, "partly?version=5", content(adapters[1]))
        assert (status, made["version"], made["engines"]) == (200, 5, 1)
        ((_, problem),) = made["failed"].items()
        assert "version=5" in problem
        before = client.stats()["requests_total"]
        assert [answer(address, "partly") for _ in range(4)] == [expected[1]] * 4
        assert client.stats()["requests_total"] == before
        client.update_adapter("partly", *stored(adapters[0]), version=11)
    until(lambda: answer(address, "partly") == expected[0])  # the gateway knows that version
    status, made = put(address, "partly", content(adapters[1]))
    assert (made["version"], made["engines"], made["failed"]) == (12, 2, {}), "above the last one of all engines"


REFUSED = {
    "too large": (lambda data: data + bytes(1 << 20), "", 413, "--max-update-bytes"),
    "no safetensors": (lambda data: b"a" * 100, "", 400, "no safetensors file"),
    "a header that is too long": (lambda data: len(data).to_bytes(8, "little") + data[8:], "", 400, "no safetensors"),
    "no JSON": (lambda data: with_header(data, lambda e, names: b"[" * 60000), "", 400, "the header of the body"),
    "no config": (
        lambda data: with_header(data, lambda e, names: e["__metadata__"].pop("adapter_config") and None),
        "",
        400,
        "no adapter_config",
    ),
    "a part": (lambda data: data[:-8], "", 400, "the tensors of the header end at byte"),
    "nothing": (lambda data: b"", "", 400, "no whole update"),
    "a shape that does not fit": (
        lambda data: with_header(data, lambda e, names: e[names[0]].update(shape=[1 << 40, 64])),
        "",
        400,
        "has .* bytes",
    ),
    "version": (lambda data: data, "?version=0", 400, "version='0' must be an integer"),
    "inflight": (lambda data: data, "?inflight=wait", 400, "must be 'pin' or 'switch'"),
    "parameter": (lambda data: data, "?replace=1", 400, "no parameter 'replace'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_changes_nothing(address, adapters, kind):
    change, query, status, text = REFUSED[kind]
    found, body = put(address, f"refused{query}", change(content(adapters[0])))
    assert found == status and re.search(text, body["error"]["message"]), body
    assert answer(address, "refused") == "model_not_found"


def test_a_rank_above_the_limit_and_names_that_are_no_adapters(address, adapters):
    status, body = put(address, "ranks", content(adapters[2]))
    assert status == 400 and "start with --max-lora-rank 20" in body["error"]["message"]
    status, body = put(address, "ranks@3", content(adapters[0]))
    assert status == 400 and body["error"]["param"] == "name"
    assert answer(address, "ranks") == "model_not_found"


def test_a_body_that_is_cut_off_changes_nothing(server, address, adapters, expected):
    assert put(address, "cut", content(adapters[0]))[0] == 200
    data, folder = content(adapters[1]), Path(server.address.removeprefix("ipc://")).parent
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), GUARD) as connection:
        head = f"PUT /v1/adapters/cut HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[: len(data) // 2])
        until(lambda: list(folder.glob("*.update-*")))
    until(lambda: not list(folder.glob("*.update-*")))
    assert answer(address, "cut") == answer(address, "cut@1") == expected[0]
    with socket.create_connection((host, int(port)), GUARD) as connection:
        head = f"PUT /v1/adapters/cut HTTP/1.1\r\nHost: {address}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 411 " in connection.recv(1 << 16).partition(b"\r\n")[0]


def test_two_updates_at_once_are_two_versions(address, adapters, expected):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda path: put(address, "twice", content(path))[1], adapters[:2]))
    assert sorted(each["version"] for each in made) == [1, 2]
    for each, tokens in zip(made, expected, strict=True):
        assert each["engines"] == 2 and answer(address, f"twice@{each['version']}") == tokens


def test_rights_and_engines_of_other_machines(tmp_path):
    data = b"\2\0\0\0\0\0\0\0{}"
    with serve_fake(tmp_path, adapters=1, http=True, admin=False) as server:
        status, body = put(address_of(server), "a0", data)
        assert status == 403 and "--allow-adapter-loading" in body["error"]["message"]
    with free_port() as port, serve_fake(tmp_path, http=True, bind=f"tcp://127.0.0.1:{port}") as server:
        status, body = put(address_of(server), "a0", data)
        assert status == 501 and "/v1/load_lora_adapter" in body["error"]["message"]
