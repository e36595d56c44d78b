"""Updates from a client's memory through a server: answers, rights, limits, hostile messages, and later processes."""

import json
import os
import re
import signal
import stat
import struct
import urllib.request
from pathlib import Path

import pytest
import torch
from msgspec import structs
from sidestream.runtime.api.adapter_update import AdapterUpdate
from sidestream.runtime.api.adapter_versions import VersionConflictError
from sidestream.runtime.api.errors import RequestError, ServerError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.protocol.messages import (
    Buffer,
    Done,
    Error,
    ListAdapters,
    OpenBuffer,
    UnloadAdapter,
    UpdateAdapter,
    Updated,
)
from sidestream.runtime.server.settings import ServeSettings
from support.serving import GUARD, free_port, serve, serve_fake
from support.tiny import AdapterSpec, oracle_greedy, tiny_adapters, tiny_llama

from ..test_llm_updates import stored

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(base):
    return tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8, targets="all-linear"), AdapterSpec(rank=20)])


@pytest.fixture(scope="module")
def expected(base, adapters):
    """The answers of the first two adapters."""
    return [oracle_greedy(base, path, PROMPT, GREEDY.max_tokens) for path in adapters[:2]]


def settings(base, adapters, **fields):
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_pages": 16, "show_progress": False}
    return ServeSettings(
        model=str(base.path),
        llm={"device": "cpu", "precision": "fp32", "max_loras": 2, "max_lora_rank": 16, **sizes},
        adapters={"policy": str(adapters[0])},
        adapter_roots=[str(adapters[0].parent)],
        max_update_bytes=1 << 20,
        **fields,
    )


@pytest.fixture(scope="module")
def server(base, adapters, tmp_path_factory):
    with serve(settings(base, adapters), tmp_path_factory.mktemp("log") / "log", http=True) as server:
        yield server


@pytest.fixture
def client(server):
    """A client of a server whose adapter `policy` is the file."""
    with Client(server.address, connect_timeout=GUARD) as client:
        yield client
        if any(each.name == "policy" for each in client.list_adapters()):
            client.unload_adapter("policy")


def answer(client, adapter):
    return client.generate([PROMPT], GREEDY, adapter=adapter)[0].outputs[0].token_ids


def content(path):
    """An update's file."""
    update = AdapterUpdate(*stored(path), "pin")
    file = bytearray(update.nbytes)
    update.copy(memoryview(file))
    return bytes(file)


def with_header(data, change):
    """A file whose header `change` has changed: it gets the entries, and returns others or the header's bytes."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    names = [name for name in entries if name != "__metadata__"]
    made = change(entries, names) or entries
    header = made if isinstance(made, bytes) else json.dumps(made).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def test_updates_answer_like_peft(client, adapters, expected):
    for version, (path, tokens) in enumerate(zip(adapters[:2], expected, strict=True), 1):
        made = client.update_adapter("policy", *stored(path))
        assert made[:2] == ("policy", version)
        assert answer(client, "policy") == answer(client, f"policy@{version}") == tokens
        assert made.content in {each.content for each in client.list_adapters() if each.name == "policy"}
    assert answer(client, "policy@1") == expected[0]
    assert answer(client, {"policy@1": 1.0}) == expected[0]
    with pytest.raises(VersionConflictError, match="has version 2, and version=2"):
        client.update_adapter("policy", *stored(adapters[0]), version=2)
    client.load_adapter("..", adapters[0])  # an odd name, but one of an adapter
    assert answer(client, "..") == expected[0]
    client.update_adapter("..", *stored(adapters[1]))
    assert answer(client, "..@1") == expected[1]
    client.unload_adapter("..")
    with pytest.raises(ServerError, match="newest version"):
        client.unload_adapter("policy@2")
    client.unload_adapter("policy@1")
    with pytest.raises(RequestError, match="'policy@1' is not known"):
        answer(client, "policy@1")
    assert answer(client, "policy") == expected[1]
    client.load_adapter("policy", adapters[0], replace=True)
    assert [each.name for each in client.list_adapters()] == ["policy"] and answer(client, "policy") == expected[0]


def test_a_stream_switches_and_says_where(client, adapters, expected):
    client.update_adapter("policy", *stored(adapters[0]))
    tokens, versions = {"policy": [], "policy@1": []}, {}
    streams = {name: client.stream(PROMPT, GREEDY, adapter=name) for name in tokens}
    for name, stream in streams.items():
        tokens[name] += next(stream).token_ids
    client.update_adapter("policy", *stored(adapters[1]), inflight="switch")
    for name, stream in streams.items():
        for chunk in stream:
            tokens[name] += chunk.token_ids
            versions[name] = chunk.versions
    assert tokens["policy@1"] == expected[0] and versions["policy@1"] is None
    if versions["policy"] is not None:  # the answer may have been complete before
        (first, old), (begin, new) = versions["policy"]
        assert (first, old, new) == (0, 1, 2) and tokens["policy"][:begin] == expected[0][:begin]


def refusal(server, data, size=None, **fields):
    """Send a file as an update; return the answer."""
    with server.connect() as wire:
        buffer = wire.call(OpenBuffer(1, max(1, len(data) if size is None else size)))
        assert isinstance(buffer, Buffer) and stat.S_IMODE(os.stat(buffer.path).st_mode) == 0o600
        Path(buffer.path).write_bytes(data)
        update = {"token": buffer.token, "bytes": max(1, len(data))} | fields
        return wire.call(UpdateAdapter(2, "policy", **update))


HOSTILE = {
    "overlap": (lambda e, names: e[names[1]].update(data_offsets=e[names[0]]["data_offsets"]), "bytes|overlap"),
    "outside": (lambda e, names: e[names[-1]].update(shape=[1 << 20], data_offsets=[0, 4 << 20]), "overlap|instead of"),
    "huge shape": (lambda e, names: e[names[0]].update(shape=[1 << 40, 64]), "has .* bytes"),
    "endless shape": (lambda e, names: e[names[0]].update(shape=[1 << 50]), "invalid sizes"),
    "dtype": (lambda e, names: e[names[0]].update(dtype="I32"), "has dtype 'I32'"),
    "no config": (lambda e, names: e.pop("__metadata__") and e, "no adapter_config"),
    "a config that is no object": (
        lambda e, names: e["__metadata__"].update(adapter_config="[1]"),
        "no adapter_config",
    ),
    "nested": (lambda e, names: b"[" * 60000, "is not JSON"),
    "no object": (lambda e, names: b"[1]", "not a JSON object"),
    "huge header": (lambda e, names: b"{" + b" " * (1 << 19) + b"}", "a header of"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(server, client, adapters, expected, kind):
    client.update_adapter("policy", *stored(adapters[0]))
    change, text = HOSTILE[kind]
    error = refusal(server, with_header(content(adapters[1]), change))
    assert isinstance(error, Error) and error.code == "adapter_error", error
    assert re.search(text, error.message) and "/" not in error.message, error.message
    assert answer(client, "policy") == expected[0]


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\xff" * 64, b"a" * 7])
def test_files_that_are_cut_off(server, client, adapters, expected, data):
    """A trainer that ends while it writes sends nothing; whoever sends half an update gets an error."""
    client.update_adapter("policy", *stored(adapters[0]))
    for half in (data, content(adapters[1])[:-8], content(adapters[1]) + bytes(8)):
        assert refusal(server, half).code == "adapter_error"
    assert answer(client, "policy") == expected[0]


def test_what_a_message_may_not_say(server, client, adapters, expected):
    client.update_adapter("policy", *stored(adapters[0]))
    data = content(adapters[1])
    with server.connect() as wire, server.connect() as other:
        foreign = other.call(OpenBuffer(1, len(data)))
        cases = [
            (UpdateAdapter(3, "policy", foreign.token, 8), "invalid_request", "open_buffer first"),
            (OpenBuffer(4, (1 << 20) + 1), "invalid_request", "--max-update-bytes 1048577"),
            (UpdateAdapter(5, "policy", "", 8), "invalid_request", "open_buffer first"),
        ]
        for message, code, text in cases:
            error = wire.call(message)
            assert (error.code, text in error.message) == (code, True), error
        own = wire.call(OpenBuffer(6, 64))
        error = wire.call(UpdateAdapter(7, "policy", own.token, 65))
        assert error.code == "invalid_request" and "the buffer has 64" in error.message
        os.truncate(own.path, 8)
        error = wire.call(UpdateAdapter(8, "policy", own.token, 64))
        assert error.code == "adapter_error" and "has 8 bytes instead of 64" in error.message
        os.unlink(own.path)
        assert wire.call(UpdateAdapter(9, "policy", own.token, 64)).code == "adapter_error"
        assert Path(foreign.path).exists()
    with server.connect() as wire:  # a buffer goes with its connection
        wire.until(lambda: not Path(foreign.path).exists())
    with pytest.raises(ServerError, match=r"rank 20, above the limit of 16: start with --max-lora-rank 20"):
        client.update_adapter("policy", *stored(adapters[2]))
    tensors, config = stored(adapters[1])
    with pytest.raises(ServerError, match="has NaN"):
        client.update_adapter("policy", {name: each * float("nan") for name, each in tensors.items()}, config)
    with pytest.raises(RequestError, match="max-update-bytes"):
        client.update_adapter("policy", tensors | {"large": torch.zeros(1 << 19)}, config)
    assert answer(client, "policy") == expected[0]


def test_two_updates_at_once(server, client, adapters):
    """The second waits, a third is refused; a later unload waits for neither."""
    data = content(adapters[1])
    with server.connect() as wire:
        buffer = wire.call(OpenBuffer(1, len(data)))
        Path(buffer.path).write_bytes(data)
        gpu_process = server.child("gpu_process")
        os.kill(gpu_process, signal.SIGSTOP)  # neither update can end before the refusals
        try:
            for call in (2, 3, 4):
                wire.send(UpdateAdapter(call, "twice", buffer.token, len(data)))
            wire.send(UnloadAdapter(5, "twice"))
            wire.until(lambda: len(wire.others) == 2)
            assert [(each.call, each.code) for each in wire.others] == [(4, "adapter_in_use"), (5, "adapter_in_use")]
        finally:
            os.kill(gpu_process, signal.SIGCONT)
        wire.others.clear()
        wire.until(lambda: len(wire.others) == 2)
        assert [(type(each), each.call, each.version) for each in wire.others] == [(Updated, 2, 1), (Updated, 3, 2)]
        wire.others.clear()
        assert isinstance(wire.call(UnloadAdapter(6, "twice")), Done)


def test_rights_and_addresses(tmp_path, adapters):
    with serve_fake(tmp_path, adapters=1, admin=False) as server, server.connect() as wire:
        for message in (OpenBuffer(1, 8), UpdateAdapter(2, "a0", "x", 8), UnloadAdapter(3, "a0@1")):
            assert wire.call(message).code == "forbidden"
    with free_port() as port, serve_fake(tmp_path, adapters=1, bind=f"tcp://127.0.0.1:{port}") as server:
        with server.connect() as wire:
            error = wire.call(OpenBuffer(1, 8))
            assert error.code == "invalid_request" and "ipc://" in error.message
        with Client(server.address) as client, pytest.raises(RequestError, match=r"connect to an ipc:// address"):
            client.update_adapter("a0", *stored(adapters[0]))


def test_versions_over_http(server, client, adapters, expected):
    client.update_adapter("policy", *stored(adapters[0]))
    client.update_adapter("policy", *stored(adapters[1]))
    address = re.search(r"answering HTTP at (\S+)", server.log.read_text())[1]
    for name, tokens in (("policy@1", expected[0]), ("policy@2", expected[1]), ("policy", expected[1])):
        body = {"model": name, "prompt": PROMPT, "max_tokens": GREEDY.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=GUARD) as reply:
            assert json.load(reply)["choices"][0]["token_ids"] == tokens


def test_later_processes_have_the_kept_versions(tmp_path, base, adapters, expected, pytestconfig):
    """Killed after an update, during one, and with the copies lost: every version as it was, or `adapter_changed`."""
    data, versions = content(adapters[0]), [expected[0], expected[1]]
    kills = ["gpu_process", "server.batcher"] * (4 if pytestconfig.getoption("--exhaustive") else 1)
    chosen = settings(base, adapters)
    with serve(structs.replace(chosen, llm=chosen.llm | {"adapter_versions": 100}), tmp_path / "log") as server:
        with Client(server.address, connect_timeout=GUARD) as client:
            client.update_adapter("policy", *stored(adapters[0]))
            client.update_adapter("policy", *stored(adapters[1]))
        for turn, role in enumerate(kills):
            with server.connect() as wire:
                buffer = wire.call(OpenBuffer(1, len(data)))
                Path(buffer.path).write_bytes(data)
                wire.send(UpdateAdapter(2, "policy", buffer.token, len(data)))
                for _ in range(turn):  # so many more messages are handled before the kill
                    wire.call(ListAdapters(3))
                server.replace(role)
            with Client(server.address, connect_timeout=GUARD) as client:
                names = {each.name for each in client.list_adapters()}
                if f"policy@{len(versions) + 1}" in names:
                    versions.append(expected[0])
                wanted = [f"policy@{version}" for version in range(1, len(versions) + 1)]
                assert names == {"policy", *wanted}
                assert [answer(client, name) for name in ("policy", *wanted)] == [versions[-1], *versions]
                made = client.update_adapter("policy", *stored(adapters[1]))
                versions.append(expected[1])
                assert made.version == len(versions)
        with Client(server.address, connect_timeout=GUARD) as client:
            client.update_adapter("other", *stored(adapters[1]))
        folder = Path(server.address.removeprefix("ipc://")).parent
        (copied,) = folder.glob(f"sidestream-*/updates/policy@{len(versions)}")
        copied.unlink()
        server.replace("gpu_process")
        with Client(server.address, connect_timeout=GUARD) as client:
            for name in ("policy", "policy@1", f"policy@{len(versions)}"):
                with pytest.raises(RequestError, match="update it again") as error:
                    answer(client, name)
                assert error.value.code == "adapter_changed"
            assert answer(client, "other") == answer(client, "other@1") == expected[1]
            assert client.update_adapter("policy", *stored(adapters[0])).version == 1
            assert answer(client, "policy") == expected[0]
        with server.connect() as wire:  # a buffer goes with its connection
            wire.until(lambda: not list(folder.glob("*.update-*")))
