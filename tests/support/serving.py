"""Servers for tests, and a client that speaks the protocol frame by frame.

with serve_fake(tmp_path, step_seconds=0.003) as server, server.connect() as wire:
    wire.submit("a", prompt_token_ids=[1, 2, 3])
    wire.answer("a")
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.protocol.framing import decode_from_server, encode
from sidestream.runtime.protocol.messages import (
    NO_INSTANCE,
    Beat,
    Chunk,
    Chunks,
    Error,
    GetHealth,
    GetStats,
    Hello,
    Message,
    Sampling,
    Submit,
    Welcome,
)
from sidestream.runtime.server.settings import ServeSettings
from sidestream.runtime.text.token_bytes import letters

TESTS = Path(__file__).parent.parent
FAKE_GPU = [sys.executable, "-m", "support.fake_gpu"]
GUARD = 60.0
"""Seconds after which a wait fails; on a busy machine a second's work may take ten."""
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


@dataclass
class Answer:
    """What came for one request."""

    accepted: int | None = None
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    usage: Any = None
    error: Error | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far; a busy server sends several in one chunk."""
        return sum(map(len, self.token_ids.values()))

    @property
    def over(self) -> bool:
        return self.usage is not None or self.error is not None

    def take(self, chunk: Chunk) -> None:
        assert not self.over, "nothing comes after the end"
        ids = self.token_ids.setdefault(chunk.index, [])
        assert chunk.first == len(ids), "no token is lost or told twice"
        ids += chunk.token_ids
        self.texts[chunk.index] = self.texts.get(chunk.index, "") + chunk.text
        if chunk.finish_reason is not None:
            self.reasons[chunk.index] = chunk.finish_reason
        self.chunks.append(chunk)
        self.usage = chunk.usage


async def known_model(router: Any) -> Any:
    """The model of a router that has just started; a call of its own waits for an engine for about a second."""
    async with asyncio.timeout(GUARD):
        while True:
            try:
                return await router.model()
            except ServerError:
                await asyncio.sleep(0.05)


class Wire:
    """One connection."""

    def __init__(self, address: str, context: "zmq.Context[Any]", hwm: int | None = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if hwm is not None:
            self.socket.rcvhwm = hwm
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(address)
        self.instance = NO_INSTANCE
        self.answers: dict[str, Answer] = {}
        self.others: list[Any] = []
        self.welcome: Welcome | None = None
        self._beat = 0.0

    def send(self, message: Message, instance: bytes | None = None) -> None:
        self.socket.send(encode(message, self.instance if instance is None else instance))

    def hello(self, timeout: float = GUARD) -> "Wire":
        """Say hello until welcomed."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            self.send(Hello("test"), NO_INSTANCE)
            try:
                self.until(
                    lambda: self.welcome is not None or any(isinstance(other, Error) for other in self.others), 5.0
                )
            except TimeoutError:
                continue
            if self.welcome is not None:
                return self
            self.others.clear()
            time.sleep(0.1)
        raise TimeoutError("no welcome")

    def greet_again(self) -> None:
        """Say hello if the server may have dropped this client, because a test computed meanwhile.

        A hello ends open requests, so tests compute what they expect before them.
        """
        waited = time.monotonic() - self._beat > 2.0
        if self.welcome is not None and waited and all(answer.over for answer in self.answers.values()):
            self.send(Hello("test"), NO_INSTANCE)

    def submit(self, request_id: str, sampling: Sampling = GREEDY, **fields: Any) -> None:
        self.greet_again()
        self.answers[request_id] = Answer()
        self.send(Submit(request_id, sampling=sampling, **fields))

    def receive(self, timeout: float = 0.0) -> bool:
        """Take one frame in; False if none came."""
        now = time.monotonic()
        if now - self._beat > 0.5 and self.welcome is not None:
            self._beat = now
            self.send(Beat())
        if not self.socket.poll(timeout * 1000):
            return False
        frame = decode_from_server(self.socket.recv())
        message = frame.message
        if isinstance(message, Welcome):
            self.welcome, self.instance = message, frame.instance
        elif isinstance(message, Chunks):
            for chunk in message.chunks:
                self.answers.setdefault(chunk.request_id, Answer()).take(chunk)
        elif type(message).__name__ == "Accepted":
            self.answers[message.request_id].accepted = message.prompt_tokens
        elif (
            isinstance(message, Error)
            and message.request_id in self.answers
            and not self.answers[message.request_id].over
            and message.code != "duplicate_id"
        ):
            self.answers[message.request_id].error = message
        elif not isinstance(message, Beat):
            self.others.append(message)
        return True

    def until(self, condition: Callable[[], bool], timeout: float = GUARD) -> None:
        end = time.monotonic() + timeout
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("it did not happen")
            self.receive(min(left, 0.2))

    def answer(self, request_id: str, timeout: float = GUARD) -> Answer:
        """Wait for a request's end."""
        self.until(lambda: self.answers[request_id].over, timeout)
        return self.answers[request_id]

    def call(self, message: Any, timeout: float = GUARD) -> Any:
        """Send a call and wait for its answer."""
        self.greet_again()
        self.send(message)
        self.until(lambda: any(getattr(other, "call", None) == message.call for other in self.others), timeout)
        found = next(other for other in self.others if getattr(other, "call", None) == message.call)
        self.others.remove(found)
        return found

    def __enter__(self) -> "Wire":
        return self.hello()

    def __exit__(self, *problem: object) -> None:
        self.socket.close(0)


@dataclass
class Server:
    """A running server: its supervisor's process, its address and what it says."""

    process: "subprocess.Popen[str]"
    address: str
    log: Path
    context: "zmq.Context[Any]"
    hold: Path | None = None
    lives: int = 1

    def connect(self, **options: Any) -> Wire:
        """A connection (greeted within `with`)."""
        return Wire(self.address, self.context, **options)

    def stats(self) -> dict[str, Any]:
        with self.connect() as wire:
            return wire.call(GetStats(1)).values

    def health(self) -> Any:
        wire = self.connect()
        try:
            end = time.monotonic() + GUARD
            while True:
                try:
                    return wire.call(GetHealth(1), 5.0)
                except TimeoutError:  # it went to a batcher that was about to end
                    if time.monotonic() > end:
                        raise
        finally:
            wire.socket.close(0)

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout: float = GUARD) -> dict[str, Any]:
        """Stats until they meet the condition."""
        with self.connect() as wire:
            end = time.monotonic() + timeout
            while not condition(values := wire.call(GetStats(1)).values):
                if time.monotonic() > end:
                    raise TimeoutError(f"stats stay at {values}")
                time.sleep(0.01)
            return values

    def child(self, module: str) -> int:
        """Process id of the batcher (`server.batcher`) or the GPU process (`fake_gpu`, `gpu_process`)."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    command = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if int(fields[1]) == self.process.pid and module in command and fields[0] != "Z":
                    return int(entry.name)
        raise LookupError(f"no child runs {module}:\n{self.log.read_text()}")

    def await_text(self, text: str, times: int = 1) -> None:
        """Wait until the log has a text so many times."""
        end = time.monotonic() + GUARD
        while self.log.read_text().count(text) < times:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def replace(self, module: str) -> None:
        """SIGKILL for a child (see `child`); returns when another one serves in its place."""
        self.await_text("serving at", self.lives)  # clients may be welcomed before that is logged
        os.kill(self.child(module), signal.SIGKILL)
        self.lives += 1
        self.await_text("serving at", self.lives)

    @contextmanager
    def held(self, beyond: int = 0) -> Iterator[None]:
        """Of a server of `serve_fake`: no step ends meanwhile, so what is open stays open.

        beyond   steps end while no sequence has more tokens than this, prompt included. Of several requests one may get
                 there before another has begun, unless all were accepted in a hold of 0
        """
        assert self.hold is not None
        self.hold.write_text(str(beyond))
        try:
            yield
        finally:
            self.hold.unlink(missing_ok=True)  # these may be nested

    def stop(self, number: int = signal.SIGTERM, timeout: float = GUARD) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def free_port() -> Iterator[int]:
    """A port of the loopback that the system gives to nobody else meanwhile; a server that sets SO_REUSEADDR, as ours
    do, may listen there.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@contextmanager
def serve(settings: ServeSettings, log: Path, engines: int = 1, http: bool = False) -> Iterator[Server]:
    """A server with these settings (`bind` is filled in), in processes of its own. It has ended when the block does.

    `http`: behind HTTP, at a free port, as several `engines` always are.
    """
    with tempfile.TemporaryDirectory(prefix="sst-") as directory:
        os.chmod(directory, 0o700)
        address = settings.bind or f"ipc://{directory}/engine.sock"
        settings = msgspec.structs.replace(settings, bind=address)
        environment = os.environ | {
            "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
            "XDG_RUNTIME_DIR": directory,
            "OMP_NUM_THREADS": "1",
        }
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "support.serving", msgspec.json.encode(settings).decode()]
                + ([str(engines)] if engines > 1 or http else []),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        context = zmq.Context()
        try:
            yield Server(process, address, log, context)
        finally:
            context.destroy(linger=0)
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()


@contextmanager
def serve_fake(
    directory: Path, *, adapters: int = 0, engines: int = 1, http: bool = False, **options: Any
) -> Iterator[Server]:
    """A server whose model is a hash.

    `options`: fields of `FakeSizes`, or of `ServeSettings`; `adapters`: how many it has, by name `a0`, `a1`, ...
    """
    model = directory / "model"
    model.mkdir(exist_ok=True)
    write_byte_tokenizer(model)
    names = {f"a{index}": str(directory / f"a{index}") for index in range(adapters)}
    for path in names.values():
        Path(path).mkdir(exist_ok=True)
    own = {name: options.pop(name) for name in list(options) if name in ServeSettings.__struct_fields__}
    settings = ServeSettings(
        **{
            "model": str(model),
            "llm": {"hold": str(directory / "hold"), **options},
            "adapters": names,
            "gpu_command": FAKE_GPU,
            "drain_seconds": 5.0,
            "adapter_roots": [str(directory)],
            "served_model_name": "fake",
            **own,
        }
    )
    with serve(settings, directory / "server.log", engines, http) as server:
        server.hold = directory / "hold"
        yield server


def write_byte_tokenizer(directory: Path) -> None:
    """Token id = byte value (0-250 only are used by the fake model)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    from sidestream.runtime.server.supervisor import Supervisor

    served = msgspec.json.decode(sys.argv[1], type=ServeSettings)
    if len(sys.argv) > 2:  # engines behind HTTP
        from sidestream.runtime.gateway.server_process import listen
        from sidestream.runtime.gateway.settings import GatewaySettings
        from sidestream.runtime.server.replica_supervisor import ReplicaSupervisor
        from sidestream.runtime.server.supervisor_loop import GatewayProcess

        gateway = [sys.executable, "-m", "sidestream.runtime.gateway.server_process"]
        front = GatewayProcess(gateway, lambda engines: GatewaySettings(engines=engines), listen("127.0.0.1", 0))
        if sys.argv[2] == "1":
            sys.exit(Supervisor(served, lambda line: print(line, flush=True), front).run())
        sys.exit(ReplicaSupervisor(served, int(sys.argv[2]), lambda line: print(line, flush=True), front).run())
    sys.exit(Supervisor(served, lambda line: print(line, flush=True)).run())
