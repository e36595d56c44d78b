"""A small server that speaks the protocol, for tests of clients: it answers what a test tells it to answer.

A request's tokens are 0, 1, 2, ... up to max_tokens, token k reads " k", and all are sent at once. With `hold` the
first one alone is sent, and with `quiet`, too, none of them.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from sidestream.runtime.protocol import framing
from sidestream.runtime.protocol import messages as protocol
from sidestream.runtime.protocol.curve_keys import ServerKeys, ZapHandler
from sidestream.runtime.protocol.messages import Chunk, Message, Usage


class WireServer:
    """Runs in a thread from `with` to its end (or `die`, which cuts all connections)."""

    def __init__(
        self,
        address: str,
        *,
        keys: ServerKeys | None = None,
        loading: int = 0,
        hold: bool = False,
        gap: float = 0.0,
        **welcome: Any,
    ) -> None:
        self.address = address
        self.instance = os.urandom(16)
        self.submits: list[protocol.Submit] = []
        self.aborts: list[str] = []
        self.calls: list[Message] = []
        self.clients: set[bytes] = set()
        self.beats = 0
        self.loading = loading
        self.hold = hold
        self.quiet = False
        self.gap = gap
        self.mute = threading.Event()
        self.refuse: Callable[[protocol.Submit], protocol.Error | None] = lambda message: None
        self.adapters = [protocol.AdapterInfo("pirate", 8, "aa", "gpu"), protocol.AdapterInfo("shout", 8, "bb", "disk")]
        self.templates: dict[str, dict[str, str]] = {}
        fields = {
            "server_version": "0",
            "model": "fake",
            "vocabulary": 97,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_adapter_slots": 8,
            "admin": True,
        }
        self.welcome = protocol.Welcome(
            **(fields | {"has_tokenizer": True, "heartbeat_seconds": 0.1, "silence_seconds": 30.0} | welcome)
        )
        self._keys = keys
        self._open: dict[tuple[bytes, str], protocol.Submit] = {}
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._raw: list[tuple[bytes, bytes]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "WireServer":
        self._thread.start()
        assert self._bound.wait(60)
        return self

    def __exit__(self, *problem: object) -> None:
        self.die()

    def die(self) -> None:
        """Cut everything."""
        self._stop.set()
        self._thread.join(60)

    def send_raw(self, frame: bytes) -> None:
        """Any bytes, to every client."""
        self._raw += [(client, frame) for client in self.clients]

    def _serve(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        gate = None if self._keys is None else ZapHandler(context, self._keys)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = self._socket.sndhwm = 0  # a full queue would drop frames
        if self._keys is not None:
            self._keys.secure(self._socket)
        self._socket.bind(self.address)
        self.address = self._socket.last_endpoint.decode().rstrip("\0")
        self._bound.set()
        beat = time.monotonic()
        while not self._stop.is_set():
            if self._socket.poll(10) and not self.mute.is_set():
                client, *frames = self._socket.recv_multipart()
                assert len(frames) == 1
                self._handle(client, framing.decode_from_client(frames[0]))
            while self._raw:
                self._socket.send_multipart(self._raw.pop(0))
            if time.monotonic() - beat > self.welcome.heartbeat_seconds and not self.mute.is_set():
                beat = time.monotonic()
                for client in self.clients:
                    self._tell(client, protocol.Beat())
        self._socket.close()
        if gate is not None:
            gate.close()
        context.term()

    def _tell(self, client: bytes, message: Message) -> None:
        self._socket.send_multipart([client, framing.encode(message, self.instance)])

    def _handle(self, client: bytes, frame: framing.Frame) -> None:
        message = frame.message
        if isinstance(message, protocol.GetHealth):
            self._tell(
                client,
                protocol.Health(
                    call=message.call, status="loading" if self.loading else "ok", progress=0.5 if self.loading else 1.0
                ),
            )
        elif isinstance(message, protocol.Hello):
            if self.loading:
                self.loading -= 1
                self._tell(client, protocol.Error(code="loading", message="still loading", retry_after=0.05))
            else:
                self.clients.add(client)
                self._tell(client, self.welcome)
        elif client not in self.clients or frame.instance != self.instance:
            code = "hello_first" if client not in self.clients else "wrong_instance"
            self._tell(client, protocol.Error(code=code, message=code))  # type: ignore[arg-type]
        elif isinstance(message, protocol.Submit):
            self._submit(client, message)
        elif isinstance(message, protocol.Abort):
            self.aborts += message.request_ids
            for request_id in message.request_ids:
                if self._open.pop((client, request_id), None) is not None:
                    last = Chunk(request_id, 0, 1, "", [], "abort", None, None, Usage(1, 1))
                    self._tell(client, protocol.Chunks(chunks=[last]))
        elif isinstance(message, protocol.Beat):
            self.beats += 1
        else:
            self._call(client, message)

    def _submit(self, client: bytes, message: protocol.Submit) -> None:
        self.submits.append(message)
        error = self.refuse(message)
        if error is not None:
            self._tell(client, error)
            return
        length = 3 if message.prompt_token_ids is None else len(message.prompt_token_ids)
        self._tell(client, protocol.Accepted(request_id=message.request_id, prompt_tokens=length))
        count, choices = message.sampling.max_tokens or 100, message.sampling.n
        if self.hold:
            self._open[client, message.request_id] = message
            if self.quiet:
                return
            self._tell(client, protocol.Chunks(chunks=[Chunk(message.request_id, 0, 0, " 0", [0])]))
            return
        begun = len(message.continues[0].token_ids) if message.continues else 0
        for token in range(begun, count):
            last = token == count - 1
            chunks = []
            for index in range(choices):
                usage = Usage(length, count * choices) if last and index == choices - 1 else None
                logprobs = (
                    None
                    if message.sampling.logprobs is None
                    else [[protocol.TokenLogprob(token, -0.5, 1, f" {token}".encode())]]
                )
                chunks.append(
                    Chunk(
                        message.request_id,
                        index,
                        token,
                        f" {token}",
                        [token],
                        "length" if last else None,
                        None,
                        logprobs,
                        usage,
                        text_offsets=None if logprobs is None else [sum(len(f" {each}") for each in range(token))],
                    )
                )
            self._tell(client, protocol.Chunks(chunks=chunks))
            if self.gap:
                time.sleep(self.gap)

    def _call(self, client: bytes, message: Any) -> None:
        self.calls.append(message)
        if isinstance(message, protocol.ListAdapters):
            self._tell(client, protocol.Adapters(call=message.call, adapters=self.adapters))
        elif isinstance(message, protocol.GetChatTemplates):
            own = self.templates.get(message.adapter, {})
            self._tell(client, protocol.ChatTemplatesFound(message.call, own, {"eos_token": "</own>"} if own else {}))
        elif isinstance(message, protocol.GetStats):
            self._tell(
                client,
                protocol.Stats(
                    call=message.call,
                    values={"pages_in_use": len(self._open), "adapter_hits_total": 3, "adapter_misses_total": 1},
                ),
            )
        elif isinstance(message, protocol.LoadAdapter) and not Path(message.path).is_absolute():
            self._tell(client, protocol.Error(code="forbidden", message="outside the adapter root", call=message.call))
        else:
            self._tell(client, protocol.Done(call=message.call))
