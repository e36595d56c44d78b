"""Keys and addresses: which addresses are safe, and which clients may connect."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from sidestream.runtime.protocol import addresses
from sidestream.runtime.protocol import curve_keys as curve
from sidestream.runtime.protocol.addresses import AddressError, AddressLock, parse
from sidestream.tools import cli


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


def arrives(server: zmq.Socket[Any], client: zmq.Socket[Any], milliseconds: int) -> bool:
    """Return whether a message of the client arrives."""
    client.send(b"hello")
    return bool(server.poll(milliseconds)) and server.recv_multipart()[-1] == b"hello"


def pair(
    context: zmq.Context[Any], server_keys: curve.ServerKeys, client_keys: curve.ClientKeys | None
) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.linger = client.linger = 0
    server_keys.secure(server)
    if client_keys is not None:
        client_keys.secure(client)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    return server, client


def test_an_allowed_client_is_heard_and_others_are_not(tmp_path: Path, context: zmq.Context[Any]) -> None:
    friend, removed = curve.generate(tmp_path / "keys", ["friend", "removed"])
    (stranger,) = curve.generate(tmp_path / "other", ["stranger"])
    (tmp_path / "keys" / "server" / "allowed" / "removed.public").unlink()
    server_keys = curve.load_server_keys(tmp_path / "keys" / "server")
    honest = curve.load_client_keys(friend)
    thief = curve.load_client_keys(stranger)
    # has the server's public key, but is not allowed
    liar = curve.ClientKeys(thief.public, honest.server, thief.secret)
    with curve.ZapHandler(context, server_keys):
        for keys, expected in (
            (honest, True),
            (curve.load_client_keys(removed), False),
            (liar, False),
            (thief, False),
            (None, False),
        ):
            server, client = pair(context, server_keys, keys)
            with server, client:
                assert arrives(server, client, 60_000 if expected else 300) == expected


def test_without_a_zap_handler_no_client_is_admitted(tmp_path: Path, context: zmq.Context[Any]) -> None:
    (folder,) = curve.generate(tmp_path, ["friend"])
    server, client = pair(context, curve.load_server_keys(tmp_path / "server"), curve.load_client_keys(folder))
    with server, client:
        assert not arrives(server, client, 300)


def test_a_client_speaks_to_no_other_engine(tmp_path: Path, context: zmq.Context[Any]) -> None:
    (folder,) = curve.generate(tmp_path / "real", ["friend"])
    curve.generate(tmp_path / "fake", ["x"])
    (tmp_path / "fake" / "server" / "allowed" / "friend.public").write_bytes(
        (tmp_path / "real" / "server" / "allowed" / "friend.public").read_bytes()
    )
    impostor = curve.load_server_keys(tmp_path / "fake" / "server")
    with curve.ZapHandler(context, impostor):
        server, client = pair(context, impostor, curve.load_client_keys(folder))
        with server, client:
            assert not arrives(server, client, 300)


def test_keys_come_and_go_while_the_engine_runs(tmp_path: Path, context: zmq.Context[Any]) -> None:
    curve.generate(tmp_path, ["first"])
    keys = curve.load_server_keys(tmp_path / "server")
    with curve.ZapHandler(context, keys):
        (folder,) = curve.generate(tmp_path, ["later"])
        for expected in (True, False):
            server, client = pair(context, keys, curve.load_client_keys(folder))
            with server, client:
                assert arrives(server, client, 60_000 if expected else 300) == expected
            (tmp_path / "server" / "allowed" / "later.public").unlink(missing_ok=True)


def test_keygen_writes_private_secrets_and_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    assert cli.main(["keys", "curve", str(keys), "--client", "alice"]) == 0
    before = (keys / "server" / "server.secret").read_bytes()
    assert cli.main(["keys", "curve", str(keys), "--client", "bob"]) == 0
    shown = capsys.readouterr().out
    assert "--keys" in shown and str(keys / "client-bob") in shown
    assert (keys / "server" / "server.secret").read_bytes() == before
    assert sorted(path.name for path in curve.load_server_keys(keys / "server").allowed.iterdir()) == [
        "alice.public",
        "bob.public",
    ]
    secrets = list(keys.rglob("*.secret"))
    assert len(secrets) == 3 and {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    for path in secrets:
        assert path.read_text().strip() not in shown
        assert path.read_text().strip() not in repr(curve.load_server_keys(keys / "server"))
    assert cli.main(["keys", "curve", str(keys), "--client", "alice"]) == 2, "nothing is overwritten"
    assert cli.main(["keys", "curve", str(keys), "--client", "../alice"]) == 2


@pytest.mark.parametrize("damage", ["open", "short", "missing", "binary", "nobody"])
def test_damaged_keys_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    curve.generate(tmp_path, ["friend"])
    secret = tmp_path / "server" / "server.secret"
    name = "server.secret"
    if damage == "open":
        secret.chmod(0o640)
    elif damage == "short":
        secret.write_text("abc\n")
    elif damage == "missing":
        secret.unlink()
    elif damage == "binary":
        secret.write_bytes(b"\xff" * 40)
    else:
        (tmp_path / "server" / "allowed" / "friend.public").unlink()
        name = "allowed"
    with pytest.raises(curve.KeyFileError, match=name):
        curve.load_server_keys(tmp_path / "server")


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("ipc:///run/x/engine.sock", True),
        ("tcp://127.0.0.1:5757", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:9", True),
        ("tcp://127.8.9.1:0", True),
        ("tcp://*:5757", False),
        ("tcp://0.0.0.0:5757", False),
        ("tcp://[::]:5757", False),
        ("tcp://gpu-host:5757", False),
        ("tcp://10.0.0.3:5757", False),
    ],
)
def test_beyond_the_loopback_keys_are_needed(text: str, local: bool) -> None:
    address = parse(text)
    assert address.local == local
    assert parse(str(address)) == address
    addresses.check_keys(address, keys=True)
    if local:
        addresses.check_keys(address, keys=False)
    else:
        with pytest.raises(AddressError, match="keys curve"):
            addresses.check_keys(address, keys=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "engine.sock",
        "ipc://",
        "ipc://@abstract",
        "ipc://relative/path",
        "ipc:///tmp/../x",
        "ipc:///" + "x" * 200,
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://[zz]:1",
        "tcp://a:1;b:2",
        "tcp://user@host:1",
        "inproc://x",
        "pgm://1.2.3.4;5:6",
        "tcp://-host:1",
        "tcp://host:1\n",
    ],
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="address"):
        parse(text)


def test_an_ipc_directory_must_be_private(tmp_path: Path) -> None:
    address = parse(f"ipc://{tmp_path}/mine/engine.sock")
    with pytest.raises(AddressError, match="sidestream serve"):
        addresses.check_private_directory(address)
    addresses.make_private_directory(address)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
    addresses.make_private_directory(address)
    (tmp_path / "mine").chmod(0o755)
    for check in (addresses.check_private_directory, addresses.make_private_directory):
        with pytest.raises(AddressError, match="mkdir -m 700") as refused:
            check(address)
        assert "chmod" not in str(refused.value)  # the directory may be / or /tmp
    (tmp_path / "mine").chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(AddressError, match="not a directory"):
        addresses.check_private_directory(parse(f"ipc://{tmp_path}/link/engine.sock"))


def test_two_engines_cannot_share_an_address(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    address = parse(f"ipc://{tmp_path}/engine.sock")
    first = AddressLock(address)
    with pytest.raises(AddressError, match="another engine"):
        AddressLock(address)
    first.release()
    AddressLock(address).release()
    assert (
        len(
            [
                name
                for name in os.listdir("/proc/self/fd")
                if os.path.realpath(f"/proc/self/fd/{name}").endswith("engine.sock.lock")
            ]
        )
        == 0
    )


def test_the_default_address_is_in_a_directory_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(addresses.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert addresses.default_address() == f"ipc://{tmp_path}/sidestream/engine.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert f"sidestream-{os.getuid()}" in addresses.default_address()
    monkeypatch.setenv(addresses.ENVIRONMENT, "tcp://127.0.0.1:7")
    assert addresses.default_address() == "tcp://127.0.0.1:7"


def test_a_closed_zap_handler_leaves_no_thread(tmp_path: Path, context: zmq.Context[Any]) -> None:
    curve.generate(tmp_path, ["friend"])
    handler = curve.ZapHandler(context, curve.load_server_keys(tmp_path / "server"))
    assert "sidestream-zap" in {thread.name for thread in threading.enumerate()}
    handler.close()
    assert "sidestream-zap" not in {thread.name for thread in threading.enumerate()}
