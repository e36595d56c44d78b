"""Peers that violate ZMTP: the server continues, keeps nothing of them, and serves all others."""

import ctypes
import time
from itertools import pairwise
from pathlib import Path

import pytest
import zmq
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.protocol import curve_keys as curve
from sidestream.runtime.protocol.framing import encode
from sidestream.runtime.protocol.messages import NO_INSTANCE, Abort, Beat, Error, Sampling, Submit
from support.fake_runner import continuation
from support.raw_curve_peer import RawCurvePeer
from support.raw_peer import MORE, PING, RawPeer, frame
from support.serving import GREEDY, GUARD, free_port, serve_fake

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_fake(tmp_path_factory.mktemp("raw"), step_seconds=0.001, max_model_len=512) as server, server.connect():
        yield server


def memory(process: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def await_memory(process: int, limit: int) -> None:
    """Wait until a process holds less."""
    end = time.monotonic() + GUARD
    while memory(process) >= limit:
        assert time.monotonic() < end, "what was held of the peers is let go of"
        time.sleep(0.1)


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
    await_memory(batcher, before + 64 * MIB)


def test_claimed_routing_ids_are_nobodys(server):
    batcher = server.child("server.batcher")
    start = 0x6B8B4567  # first routing id of libzmq in a process with an unseeded rand()
    claims = [b"\0" + (start + count).to_bytes(4, "big") for count in range(30)]
    peers = [RawPeer(server.address, claim) for claim in [*claims, *(b"%d" % count for count in range(1, 60))]]
    for peer in peers:
        peer.socket.sendall(frame(encode(Beat())))
    for _ in range(5):
        assert_serves(server, batcher)
    for peer in peers:
        peer.close()
    assert_serves(server, batcher)


def test_who_has_a_key_can_claim_no_id_that_libzmq_would_give(tmp_path):
    """With keys libzmq reads the connections. It counts ids up from two calls of rand(), and a newcomer whose id is
    taken would abort the process.
    """
    libc = ctypes.CDLL(None)
    libc.srand(1)  # as in a process without a seed
    drawn = [libc.rand() for _ in range(12)]
    starts = [low | (high & 1) << 31 for low, high in pairwise(drawn)]
    (friend,) = curve.generate(tmp_path / "keys", ["friend"])
    keys, bind = curve.load_client_keys(friend), "tcp://127.0.0.1:{}"
    with (
        free_port() as port,
        serve_fake(tmp_path, bind=bind.format(port), keys=str(tmp_path / "keys" / "server")) as server,
        zmq.Context() as context,
    ):
        with Client(server.address, keys=friend, connect_timeout=60) as client:
            client.health()
        batcher, peers = server.child("server.batcher"), []
        for claim in sorted({start + count for start in starts for count in range(6)}):
            peers.append(context.socket(zmq.DEALER))
            peers[-1].linger, peers[-1].routing_id = 0, b"\0" + claim.to_bytes(4, "big")
            keys.secure(peers[-1])
            peers[-1].connect(server.address)
            peers[-1].send(encode(Beat()))
        assert all(peer.poll(60_000) for peer in peers), "each gets hello_first"
        for _ in range(8):
            with Client(server.address, keys=friend, connect_timeout=60) as client:
                answer = client.generate([[7, 8]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
                assert answer[0].outputs[0].token_ids == continuation([7, 8], -1, 6, 251)
        assert server.child("server.batcher") == batcher, "it is the same process"
        for peer in peers:
            peer.close()


def test_a_peer_that_holds_a_key_ends_nothing_by_hanging_up(tmp_path):
    """libzmq reads these connections, until its queue of a peer is full."""
    (friend,) = curve.generate(tmp_path / "keys", ["friend"])
    keys, body = curve.load_client_keys(friend), encode(Submit("a", prompt_token_ids=[300] * (1 << 18)))
    with (
        free_port() as port,
        serve_fake(tmp_path, bind=f"tcp://127.0.0.1:{port}", keys=str(tmp_path / "keys" / "server")) as server,
        Client(server.address, keys=friend, connect_timeout=60) as client,
    ):
        client.health()
        batcher = server.child("server.batcher")
        before = memory(batcher)
        for endless in (0, 0, 64):  # MiB
            peers = [RawCurvePeer(server.address, keys) for _ in range(5)]
            for peer in peers[1:]:
                peer.pour(body, 40, flags=0, patience=1.0)
            assert peers[0].pour(bytes(MIB), endless, patience=GUARD) == endless
            for peer in peers:
                peer.close()
            time.sleep(1.0)
            answer = client.generate([[7, 8]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
            assert answer[0].outputs[0].token_ids == continuation([7, 8], -1, 6, 251)
        assert server.child("server.batcher") == batcher, "it is the same process"
        await_memory(batcher, before + 256 * MIB)  # of 424 MiB received; what a round leaves belongs to the allocator


def test_a_message_without_end_of_a_peer_that_holds_a_key_is_cut_off(tmp_path):
    """By its bytes: libzmq keeps its parts. Others that send a lot at the same time are not taken for it."""
    (friend,) = curve.generate(tmp_path / "keys", ["friend"])
    keys = curve.load_client_keys(friend)
    whole = encode(Submit("a", prompt_token_ids=[300] * (1 << 20)))  # 3 MiB, refused
    with (
        free_port() as port,
        serve_fake(tmp_path, bind=f"tcp://127.0.0.1:{port}", keys=str(tmp_path / "keys" / "server")) as server,
        Client(server.address, keys=friend, connect_timeout=60) as client,
    ):
        client.health()
        batcher = server.child("server.batcher")
        before = memory(batcher)
        peer, busy = RawCurvePeer(server.address, keys), RawCurvePeer(server.address, keys)
        sent = 0
        for turn in range(1200):
            if turn % 10 == 0:
                assert busy.pour(whole, 1, flags=0, patience=GUARD) == 1, "a peer that completes its messages is read"
            if peer.pour(bytes(MIB), 1, patience=GUARD) == 0:
                break
            sent += 1
        assert 64 <= sent < 1200, "it is cut off after 64 MiB, when that is seen"
        await_memory(batcher, before + 256 * MIB)
        answer = client.generate([[7, 8]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert answer[0].outputs[0].token_ids == continuation([7, 8], -1, 6, 251)
        assert server.child("server.batcher") == batcher, "it is the same process"
        peer.close()
        busy.close()


@pytest.mark.parametrize("size", [0, MIB])
def test_a_message_without_end_is_not_kept(server, size):
    batcher = server.child("server.batcher")
    before = memory(batcher)
    peer = RawPeer(server.address)
    assert peer.pour(frame(bytes(size), MORE), 400) < 400 or peer.read(1) == b"", "it is cut off"
    await_memory(batcher, before + 32 * MIB)
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
        with server.held(beyond=20):
            wire.submit("a", long, prompt_token_ids=[1])
            wire.until(lambda: wire.answers["a"].num_tokens > 2)
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
