"""Misbehaving peers: through libzmq, and raw sockets that speak ZMTP 3.0 (https://rfc.zeromq.org/spec/23)."""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import zmq

from ....runtime.protocol import framing
from ....runtime.protocol import messages as protocol
from ....runtime.protocol.addresses import parse
from .frames import frames

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame."""


def raw_connection(address: str, timeout: float = 5.0) -> socket.socket:
    """Return a stream socket to a server's ipc or tcp address, before any greeting. Raises OSError."""
    where = parse(address)
    made = socket.socket(socket.AF_UNIX if where.path is not None else socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(timeout)
    try:
        made.connect(str(where.path) if where.path is not None else (where.host, where.port))
    except OSError:
        made.close()
        raise
    return made


def zmtp_frame(body: bytes, flags: int = 0) -> bytes:
    """Return one ZMTP frame."""
    if len(body) > 255:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def ready_command(identity: bytes = b"") -> bytes:
    """Return the READY command of a DEALER with this identity."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return zmtp_frame(body, COMMAND)


def half_greetings(address: str, source: random.Random) -> int:
    """Open connections that send a part of a greeting, or garbage, and close."""
    for _ in range(20):
        with contextlib.suppress(OSError), raw_connection(address) as peer:
            said = GREETING + ready_command()
            peer.sendall(
                source.choice((said[: source.randrange(len(said))], source.randbytes(200), b"GET / HTTP/1.1\r\n\r\n"))
            )
    return 20


def forged_identities(address: str, source: random.Random) -> int:
    """Connect with routing ids that libzmq would assign next, and with random ones."""
    count = 64
    with contextlib.ExitStack() as open_peers:
        for index in range(count):
            with contextlib.suppress(OSError):
                peer = open_peers.enter_context(raw_connection(address))
                first = source.randrange(1 << 31)
                claimed = source.choice((b"\0" + struct.pack(">I", (first + index) & 0xFFFFFFFF), source.randbytes(5)))
                peer.sendall(GREETING + ready_command(claimed))
    return count


def endless_parts(address: str, source: random.Random) -> int:
    """Send one message with endless parts, until the server disconnects or 64 MiB are sent."""
    part = zmtp_frame(source.randbytes(1 << 16), MORE)
    with contextlib.suppress(OSError), raw_connection(address) as peer:
        peer.sendall(GREETING + ready_command())
        for _ in range(1024):
            peer.sendall(part)
    return 1


def hang_ups(address: str, source: random.Random) -> int:
    """Send large frames until the server stops reading, then close."""
    body = zmtp_frame(source.randbytes(768 << 10))
    for _ in range(4):
        with contextlib.suppress(OSError), raw_connection(address, timeout=1.0) as peer:
            peer.sendall(GREETING + ready_command())
            for _ in range(64):
                peer.sendall(body)
    return 4


@contextlib.contextmanager
def dealer(address: str, **options: int) -> Iterator["zmq.Socket[Any]"]:
    """A DEALER with its own context, closed without linger."""
    context: zmq.Context[Any] = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.linger = 0
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    made.connect(address)
    try:
        yield made
    finally:
        made.close(linger=0)
        context.term()


def greeted(peer: "zmq.Socket[Any]") -> bytes | None:
    """Send Hello; return the engine's instance id, or None without an answer within 5 s."""
    peer.send(framing.encode(protocol.Hello("chaos"), protocol.NO_INSTANCE))
    while peer.poll(5000):
        frame = framing.decode_from_server(peer.recv())
        if isinstance(frame.message, protocol.Welcome):
            return frame.instance
    return None


def hostile_frames(address: str, source: random.Random) -> int:
    """Send 10,000 of `frames` from one connection that reads its answers."""
    count = 10_000
    with dealer(address) as peer:
        instance = greeted(peer) or protocol.NO_INSTANCE
        for frame in frames(source, count, instance):
            with contextlib.suppress(zmq.Again):
                peer.send(frame, zmq.NOBLOCK)
            while peer.poll(0):
                peer.recv_multipart()
    return count


def greedy_client(address: str, source: random.Random) -> int:
    """Send 32 long requests from one client, and cancel half of them."""
    count = 32
    with dealer(address) as peer:
        instance = greeted(peer)
        if instance is None:
            return 0
        for index in range(count):
            ids = [source.randrange(3, 200) for _ in range(100)]
            sampling = protocol.Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
            asked = protocol.Submit(f"g{index}", prompt_token_ids=ids, sampling=sampling)
            peer.send(framing.encode(asked, instance))
        time.sleep(0.2)
        peer.send(framing.encode(protocol.Abort([f"g{index}" for index in range(0, count, 2)]), instance))
        end = time.monotonic() + 2.0
        while time.monotonic() < end and peer.poll(100):
            peer.recv_multipart()
    return count


def large_prompts(address: str, source: random.Random) -> int:
    """Send a hundred prompts of 1 MB of text, each cancelled at once."""
    count = 100
    text = "".join(source.choice("abcdefgh ") for _ in range(protocol.MAX_PROMPT_CHARACTERS - 1))
    with dealer(address) as peer:
        instance = greeted(peer)
        if instance is None:
            return 0
        for index in range(count):
            peer.send(framing.encode(protocol.Submit(f"t{index}", prompt=text), instance))
            peer.send(framing.encode(protocol.Abort([f"t{index}"]), instance))
    return count


def frozen_client(address: str, source: random.Random) -> int:
    """Ask for long answers and never read."""
    count = 8
    with dealer(address, RCVHWM=1, RCVBUF=4096) as peer:
        instance = greeted(peer)
        if instance is None:
            return 0
        for index in range(count):
            sampling = protocol.Sampling(temperature=0.0, max_tokens=128, ignore_eos=True)
            asked = protocol.Submit(f"f{index}", prompt_token_ids=[source.randrange(3, 200)], sampling=sampling)
            peer.send(framing.encode(asked, instance))
        time.sleep(2.0)
    return count


def silent_crowd(address: str, source: random.Random) -> int:
    """Open 400 connections without a Hello for a second."""
    count = 400
    with contextlib.ExitStack() as crowd:
        for _ in range(count):
            with contextlib.suppress(OSError):
                crowd.enter_context(raw_connection(address)).sendall(GREETING + ready_command())
        time.sleep(1.0)
    return count
