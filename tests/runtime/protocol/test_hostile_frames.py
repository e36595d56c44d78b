"""Malformed frames: the decoder refuses them and a server continues.

SIDESTREAM_HOSTILE_FRAMES sets how many are sent (default 3000; 100000 before a release).
"""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.protocol import framing
from sidestream.runtime.protocol import messages as protocol
from support.fake_runner import continuation
from support.hostile import corpus, frames
from support.serving import Server, serve_fake

COUNT = int(os.environ.get("SIDESTREAM_HOSTILE_FRAMES", "3000"))
INSTANCE = bytes(range(16))
HEAD = framing.header(INSTANCE)
NAMES = st.sampled_from(["type", "request_id", "prompt", "sampling", "call", "n"]) | st.text(max_size=5)
LIKE_MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


def check(frame: bytes) -> None:
    """The decoders either understand a frame or raise FrameError with a text fit for a log."""
    for decode in (framing.decode_from_client, framing.decode_from_server):
        try:
            assert isinstance(decode(frame).message, protocol.Message)
        except framing.FrameError as problem:
            assert problem.code in ("bad_frame", "unsupported_version", "invalid_request")
            assert len(str(problem)) < 300 and str(problem).isprintable()


@pytest.mark.parametrize("name", sorted(corpus()))
def test_the_corpus(name: str) -> None:
    data = corpus()[name]
    check(data if name.startswith("raw_") else HEAD + data)


def test_each_message_of_the_protocol_is_in_the_corpus() -> None:
    found = set()
    for name, data in corpus().items():
        with contextlib.suppress(framing.FrameError):
            found.add(type(framing.decode_from_client(data if name.startswith("raw_") else HEAD + data).message))
    assert {kind.__name__ for kind in found} == {
        "Hello",
        "Submit",
        "Abort",
        "LoadAdapter",
        "UnloadAdapter",
        "ListAdapters",
        "GetStats",
        "GetHealth",
        "Beat",
    }


@pytest.mark.parametrize(
    "message",
    [protocol.UnloadAdapter(1, "a\n"), protocol.Abort(["a\n"]), protocol.LoadAdapter(1, "a", "/x\0\n")],
    ids=["name", "id", "path"],
)
def test_a_name_ends_where_its_text_ends(message: protocol.Message) -> None:
    """`$` in a pattern would allow a final newline."""
    with pytest.raises(framing.FrameError, match="matching regex"):
        framing.decode_from_client(HEAD + msgspec.msgpack.encode(message))


@settings(max_examples=max(100, COUNT // 50), deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    check(data)
    check(HEAD + data)


@settings(max_examples=max(100, COUNT // 50), deadline=None)
@given(LIKE_MSGPACK, st.sampled_from(["submit", "abort", "hello", "load_adapter", "chunks", "welcome", "error"]))
def test_random_messages(value: Any, kind: str) -> None:
    check(HEAD + msgspec.msgpack.encode(value))
    if isinstance(value, dict):
        check(HEAD + msgspec.msgpack.encode(value | {"type": kind}))


def test_mutated_frames() -> None:
    for frame in frames(6, COUNT, INSTANCE):
        check(frame)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\xa4type"])
def test_deep_nesting_is_refused_without_a_crash(opening: bytes) -> None:
    for depth in (100, 10_000, 1_000_000):
        check(HEAD + (opening * depth)[: protocol.MAX_FRAME_BYTES - 30])


@pytest.mark.parametrize(
    "message",
    [
        protocol.Submit("a\n", prompt="x"),
        protocol.Submit("a", prompt="x", adapter="a\n"),
        protocol.Abort(["a\n"]),
        protocol.LoadAdapter(1, "a\n", "/x"),
        protocol.LoadAdapter(1, "a", "/x\0"),
    ],
)
def test_a_name_does_not_end_with_a_line(message: protocol.Message) -> None:
    with pytest.raises(framing.FrameError):
        framing.decode_from_client(framing.encode(message, INSTANCE))


class Process:
    """What a process holds."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").exists() and " Z " not in Path(f"/proc/{self.pid}/stat").read_text()

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Attacker:
    """A connection that sends what it likes; it reads its answers now and then, or never."""

    def __init__(self, context: "zmq.Context[Any]", address: str, reads: bool) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.reads = reads
        self.answers: dict[str, int] = {}

    def hello(self) -> bytes:
        """Becomes a client; the engine's instance id."""
        self.socket.send(framing.encode(protocol.Hello("attacker")))
        while self.socket.poll(60_000):
            frame = framing.decode_from_server(self.socket.recv())
            if isinstance(frame.message, protocol.Welcome):
                return frame.instance
        raise TimeoutError("no welcome")

    def send(self, parts: list[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        if self.reads:
            self.read()

    def read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                message = framing.decode_from_server(self.socket.recv(zmq.NOBLOCK)).message
                kind = message.code if isinstance(message, protocol.Error) else type(message).__name__
                self.answers[kind] = self.answers.get(kind, 0) + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all of these: none of them may harm it."""
    sizes = {"max_num_seqs": 8, "num_pages": 64, "num_slots": 2, "max_model_len": 512, "step_seconds": 0.0005}
    with serve_fake(tmp_path_factory.mktemp("served"), adapters=3, **sizes) as server:
        yield server


def honest(server: Server, stop: threading.Event, problems: list[BaseException], answered: list[int]) -> None:
    """A client that sends requests meanwhile and checks the answers."""
    source = random.Random(server.address)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    try:
        with Client(server.address, connect_timeout=60) as client:
            while not stop.is_set():
                prompt, adapter = [source.randrange(250) for _ in range(12)], source.choice((None, 0, 1, 2))
                (output,) = client.generate(
                    [prompt], params, adapter=None if adapter is None else f"a{adapter}", timeout=60, priority=-1000
                )
                assert output.outputs[0].token_ids == continuation(prompt, -1 if adapter is None else adapter, 4, 251)
                answered.append(1)
    except BaseException as problem:
        problems.append(problem)


def settled(server: Server) -> dict[str, Any]:
    """Stats when nothing is open any more."""
    return server.wait_for(
        lambda values: values["requests_open"] == 0 and values["pages_in_use"] == 0 and values["connections"] <= 1,
    )


def attack(server: Server, count: int, seed: int) -> dict[str, int]:
    """Send `count` hostile frames over several connections, and drop these; what was answered."""
    source = random.Random(seed)
    context: zmq.Context[Any] = zmq.Context()
    attackers = [Attacker(context, server.address, reads=index > 0) for index in range(4)]
    *_, instance = [attacker.hello() for attacker in attackers]
    hello = framing.encode(protocol.Hello("attacker"))
    answers: dict[str, int] = {}
    for number, frame in enumerate(frames(seed, count, instance)):
        attacker = source.choice(attackers)
        attacker.send(
            [frame, b"more"] if source.random() < 0.02 else [b"", frame] if source.random() < 0.02 else [frame]
        )
        if number % 16 == 0:
            attacker.send([hello])  # or it would be ignored, after enough of these
        if number % 500 == 499:
            time.sleep(0.01)
            attackers.append(Attacker(context, server.address, reads=True))
            attackers.pop(source.randrange(len(attackers) - 1)).socket.close(0)
    server.wait_for(lambda values: values["bad_frames_total"] > count / 10)
    for attacker in attackers:
        attacker.read()
        for kind, times in attacker.answers.items():
            answers[kind] = answers.get(kind, 0) + times
    context.destroy(linger=0)
    return answers


def test_a_server_survives_and_keeps_nothing(server: Server) -> None:
    with Client(server.address, connect_timeout=60) as client:
        client.generate([[1, 2, 3]], adapter="a0")
    batcher = Process(server.child("server.batcher"))
    gpu = Process(server.child("fake_gpu"))
    seed = 7
    attack(server, max(300, COUNT // 10), seed)  # what it keeps for good, it has now
    settled(server)
    files, memory = batcher.files, batcher.memory
    stop, problems, answered = threading.Event(), [], []  # type: ignore[var-annotated]
    thread = threading.Thread(target=honest, args=(server, stop, problems, answered))
    thread.start()
    try:
        answers = attack(server, COUNT, seed + 1)
        end = time.monotonic() + 60
        while not (answered or problems) and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join(60)
    assert not problems, f"{problems}, seed {seed}, the server's log: {server.log.read_text()[-3000:]}"
    values = settled(server)
    assert batcher.alive and gpu.alive and server.health().status == "ok", f"seed {seed}"
    assert server.child("server.batcher") == batcher.pid and server.child("fake_gpu") == gpu.pid, (
        "nothing was restarted"
    )
    assert {"bad_frame", "invalid_request", "Accepted"} <= set(answers), "they were read, and some were served"
    assert answered and values["bad_frames_total"] > COUNT / 10
    assert batcher.files <= files + 4, "no sockets are left"
    assert batcher.memory - memory < 32 << 20, "no memory is left"
    with Client(server.address, connect_timeout=60) as client:
        (output,) = client.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert output.outputs[0].token_ids == continuation([5, 6, 7], -1, 3, 251)


def test_bytes_that_are_not_even_zeromq(server: Server) -> None:
    with Client(server.address, connect_timeout=60) as client:
        batcher = Process(server.child("server.batcher"))
        files = batcher.files
        source = random.Random(8)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        for number in range(60):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(60)
                raw.connect(server.address.removeprefix("ipc://"))
                with contextlib.suppress(OSError):
                    raw.sendall(
                        (greeting[: source.randrange(80)] if number % 2 else b"")
                        + source.randbytes(source.choice((0, 1, 64, 5000)))
                    )
        assert client.generate([[1]], SamplingParams(max_tokens=2), timeout=60)[0].finished
        deadline = time.monotonic() + 60
        while batcher.files > files + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert batcher.alive and batcher.files <= files + 2


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else(server: Server) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with Client(server.address, connect_timeout=60) as client:
        stream = client.stream([1, 2], SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        batcher = Process(server.child("server.batcher"))
        memory = batcher.memory
        for _ in range(5):
            giant = Attacker(context, server.address, reads=False)
            instance = giant.hello()
            giant.send([framing.header(instance) + bytes(5 << 20)])
            time.sleep(0.05)
            giant.socket.close(0)
        assert len(list(stream)) > 0
        assert batcher.alive and batcher.memory - memory < 32 << 20
        with pytest.raises(ValueError, match="at most"):
            client.generate("x" * (5 << 20))
    context.destroy(linger=0)
