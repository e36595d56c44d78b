"""Peers that do what no libzmq does: the server goes on, keeps nothing of them, and serves everybody else."""

import time
from pathlib import Path

import pytest
from sidestream.runtime.wire.protocol import NO_INSTANCE, Abort, Beat, Error, Sampling, Submit, encode
from support.fake_runner import continuation
from support.raw_peer import MORE, PING, RawPeer, frame
from support.serving import GREEDY, serve_fake

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_fake(tmp_path_factory.mktemp("raw"), step_seconds=0.001, max_model_len=512) as server, server.connect():
        yield server


def memory(process: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def assert_serves(server, batcher):
    assert server.child("server.batcher") == batcher, "it is the same process"
    with server.connect() as wire:
        wire.submit("check", GREEDY, prompt_token_ids=[7, 8])
        assert wire.answer("check").token_ids[0] == continuation([7, 8], -1, 8, 251)


@pytest.mark.parametrize("last", [b"", PING * 50])
def test_hanging_up_while_much_is_unread(server, last):
    batcher = server.child("server.batcher")
    before = memory(batcher)
    body = encode(Submit("a", prompt_token_ids=[300] * (1 << 18)))  # 768 KiB, and slow to read
    peers = [RawPeer(server.address) for _ in range(4)]
    for peer in peers:
        peer.pour(frame(body) + last, 60, patience=1.0)
    for peer in peers:
        peer.close()
    for _ in range(3):  # a heartbeat would be due
        time.sleep(1.0)
        assert_serves(server, batcher)
    assert memory(batcher) - before < 64 * MIB


def test_claimed_routing_ids_are_nobodys(server):
    batcher = server.child("server.batcher")
    start = 0x6B8B4567  # where libzmq begins to count in a process whose rand() nobody seeded
    claims = [b"\0" + (start + count).to_bytes(4, "big") for count in range(30)]
    peers = [RawPeer(server.address, claim) for claim in [*claims, *(b"%d" % count for count in range(1, 60))]]
    for peer in peers:
        peer.socket.sendall(frame(encode(Beat())))
    for _ in range(5):
        assert_serves(server, batcher)
    for peer in peers:
        peer.close()
    assert_serves(server, batcher)


@pytest.mark.parametrize("size", [0, MIB])
def test_a_message_without_end_is_not_kept(server, size):
    batcher = server.child("server.batcher")
    before = memory(batcher)
    peer = RawPeer(server.address)
    assert peer.pour(frame(bytes(size), MORE), 400) < 400 or peer.read(1) == b"", "it is cut off"
    assert memory(batcher) - before < 32 * MIB
    assert_serves(server, batcher)
    peer.close()


def test_unfinished_frames_of_many_are_bounded(server, tmp_path):
    batcher = server.child("server.batcher")
    before = memory(batcher)
    peers = [RawPeer(server.address) for _ in range(100)]
    for peer in peers:
        peer.pour(frame(bytes(4 * MIB))[:-1], 1)
    assert_serves(server, batcher)
    assert memory(batcher) - before < 350 * MIB
    for peer in peers:
        peer.close()


def test_a_stranger_is_told_to_say_hello(server):
    wire = server.connect()
    wire.send(Beat(), NO_INSTANCE)
    wire.until(lambda: bool(wire.others))
    assert isinstance(wire.others[0], Error)
    assert wire.others[0].code == "hello_first"
    wire.socket.close(0)


def test_a_wrong_instance_ends_its_requests(server):
    with server.connect() as wire:
        long = Sampling(temperature=0.0, ignore_eos=True, max_tokens=450)
        wire.submit("a", long, prompt_token_ids=[1])
        wire.until(lambda: len(wire.answers["a"].chunks) > 2)
        wire.send(Beat(), b"x" * 16)
        wire.until(lambda: any(getattr(other, "code", "") == "wrong_instance" for other in wire.others))
        server.wait_for(lambda values: values["requests_open"] == 0 and values["pages_in_use"] == 0)
        assert not wire.answers["a"].over


def test_an_id_that_is_used_again_gets_its_own_prompt(server):
    with server.connect() as wire:
        wire.submit("other", GREEDY, prompt="z" * MIB)  # keeps the encoder busy
        wire.submit("a", GREEDY, prompt="x" * 3000)
        wire.send(Abort(["a"]))
        wire.until(lambda: wire.answers["a"].over)
        for _ in range(20):
            wire.submit("a", GREEDY, prompt="y" * MIB)
            wire.send(Abort(["a"]))
            wire.until(lambda: wire.answers["a"].over)
        short = "y" * 3000  # too long for the model as well, by another count of tokens
        wire.submit("a", GREEDY, prompt=short)
        assert "3000 tokens" in wire.answer("a").error.message
