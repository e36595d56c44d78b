"""What clients ask for, one message at a time.

Whatever is wrong with a message is answered to its sender and concerns nobody else.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from ..engine.engine import Request
from ..requests.errors import RequestError
from ..requests.sampling_params import SamplingParams
from ..text.encoder import INLINE_CHARACTERS, Encoder
from ..text.prompts import check_request
from ..text.tokenizer import Tokenizer
from ..wire.protocol import (
    MAX_OPEN_REQUESTS,
    NO_INSTANCE,
    Abort,
    Accepted,
    AdapterInfo,
    Adapters,
    Beat,
    Done,
    Error,
    ErrorCode,
    FrameError,
    GetHealth,
    GetStats,
    Health,
    Hello,
    ListAdapters,
    LoadAdapter,
    Message,
    Stats,
    Submit,
    UnloadAdapter,
    Welcome,
    decode_from_client,
)
from .connections import MAX_FAULTS, Client, Connections
from .gpu_link import Answer
from .open_requests import OpenRequest, OpenRequests
from .settings import ServeSettings
from .stepper import Stepper

_log = logging.getLogger(__name__)
FAULT = "a fault in the server while this request was worked on; others are not affected"
LOADING_RETRY = 1.0
OVERLOAD_RETRY = 1.0


class FrontDesk:
    """Serves the clients' messages. `stepper` is None while no model is ready; `draining` refuses new requests."""

    def __init__(
        self,
        settings: ServeSettings,
        connections: Connections,
        requests: OpenRequests,
        tokenizer: Tokenizer | None,
        encoder: Encoder | None,
        greeting: Callable[[Stepper], Welcome],
        health: Callable[[int], Health],
        stats: Callable[[], dict[str, int | float]],
    ) -> None:
        self.settings = settings
        self.connections, self.requests = connections, requests
        self.stepper: Stepper | None = None
        self.draining = False
        self._tokenizer, self._encoder = tokenizer, encoder
        self._greeting, self._health, self._stats = greeting, health, stats
        self._encoding: dict[str, tuple[OpenRequest, Submit, SamplingParams]] = {}
        self._tickets: dict[int, tuple[Client, int, LoadAdapter | UnloadAdapter]] = {}
        self._next_ticket = 0
        self._default_params = SamplingParams()
        self.bad_frames = 0

    def receive(self, parts: list[bytes]) -> None:
        """One multipart message of the ROUTER socket: routing id and frame.

        Never raises for anything that a client can send.
        """
        client = self.connections.heard(parts[0])
        if client is None:
            return
        try:
            if len(parts) != 2:
                raise FrameError("bad_frame", f"a message is one frame, this one has {len(parts) - 1}")
            frame = decode_from_client(parts[1])
        except FrameError as error:
            self._fault(client, error)
            return
        client.faults = 0
        message = frame.message
        if isinstance(message, Hello):
            self._hello(client)
        elif isinstance(message, GetHealth):
            self.connections.say(client, self._health(message.call))
        elif frame.instance != self.connections.instance and frame.instance != NO_INSTANCE:
            client.greeted = False
            self.connections.say(
                client, Error("wrong_instance", "the engine was restarted; its requests are lost; say hello again")
            )
        elif not client.greeted:
            if not isinstance(message, Beat):
                self.connections.say(client, Error("hello_first", "this connection is not known; say hello first"))
        else:
            self._serve(client, message)

    def _fault(self, client: Client, error: FrameError) -> None:
        self.bad_frames += 1
        client.faults += 1
        if client.faults <= MAX_FAULTS:
            self.connections.say(client, Error(error.code, str(error)[:4096], error.request_id, error.call))

    def _serve(self, client: Client, message: Message) -> None:
        request_id, call = getattr(message, "request_id", None), getattr(message, "call", None)
        try:
            if isinstance(message, Submit):
                self._submit(client, message)
            elif isinstance(message, Abort):
                for each in message.request_ids:
                    self.abort(self.requests.get(client.open.get(each, "")))
            elif isinstance(message, (LoadAdapter, UnloadAdapter)):
                self._change_adapters(client, message)
            elif isinstance(message, ListAdapters):
                self.connections.say(client, Adapters(message.call, self._adapters()))
            elif isinstance(message, GetStats):
                self.connections.say(client, Stats(message.call, self._stats()))
        except Exception:
            _log.exception("a fault while a message of client %d was served", client.number)
            request = self.requests.get(client.open.get(request_id, "")) if request_id is not None else None
            if request is not None:
                self._drop(request)
                self.requests.refuse(request, "request_failed", FAULT)
            else:
                self.connections.say(client, Error("request_failed", FAULT, request_id, call))

    def _hello(self, client: Client) -> None:
        for key in list(client.open.values()):
            self.abort(self.requests.get(key))
        if self.stepper is None:
            self.connections.say(client, Error("loading", "the model is being loaded", retry_after=LOADING_RETRY))
            return
        client.greeted = True
        self.connections.say(client, self._greeting(self.stepper))

    # -- requests --------------------------------------------------------------------------------------------------

    def _submit(self, client: Client, message: Submit) -> None:
        refusal = self._refusal(client, message)
        if refusal is not None:
            self.requests.counts["refused_total"] += 1
            self.connections.say(client, refusal)
            return
        request = self.requests.begin(client, message.request_id, message.stream)
        try:
            params = self._params(message)
        except RequestError as error:
            self.requests.refuse(request, "invalid_request", str(error)[:4096], how="refused")
            return
        if message.prompt_token_ids is not None:
            self._enqueue(request, message, params, message.prompt_token_ids)
        elif message.prompt is not None and self._tokenizer is not None:
            if len(message.prompt) <= INLINE_CHARACTERS or self._encoder is None:
                self._enqueue(request, message, params, self._tokenizer.encode(message.prompt))
            else:
                self._encoding[request.key] = request, message, params
                self._encoder.put(request.key, message.prompt)
        else:
            text = "text needs a tokenizer, and this model has none; send prompt_token_ids"
            self.requests.refuse(request, "invalid_request", text, how="refused")

    def _refusal(self, client: Client, message: Submit) -> Error | None:
        def error(code: ErrorCode, text: str, retry_after: float | None = None) -> Error:
            return Error(code, text, message.request_id, retry_after=retry_after)

        if message.request_id in client.open:
            return error(
                "duplicate_id", f"request_id {message.request_id!r} is open on this connection; choose another"
            )
        if self.draining:
            return error("draining", "the server is about to stop")
        if self.stepper is None:
            return error("loading", "the model is being loaded", LOADING_RETRY)
        if len(client.open) >= MAX_OPEN_REQUESTS:
            return error(
                "too_many_requests",
                f"this connection has {MAX_OPEN_REQUESTS} requests open; wait for one to end",
                OVERLOAD_RETRY,
            )
        if self.stepper.scheduler.num_waiting + len(self._encoding) + message.sampling.n > self.settings.max_waiting:
            return error("overloaded", "too many requests are waiting", OVERLOAD_RETRY)
        if (message.prompt is None) == (message.prompt_token_ids is None):
            return error("invalid_request", "give exactly one of prompt and prompt_token_ids")
        if message.adapter is not None and message.adapter not in self.stepper.numbers:
            return error("unknown_adapter", f"adapter {message.adapter!r} is not known; list_adapters tells which are")
        return None

    def _params(self, message: Submit) -> SamplingParams:
        changed = {name: value for name, value in structs.asdict(message.sampling).items() if value != _DEFAULTS[name]}
        return SamplingParams(**changed) if changed else self._default_params

    def _enqueue(self, request: OpenRequest, message: Submit, params: SamplingParams, ids: list[int]) -> None:
        """Hand a tokenized request to the engine."""
        stepper = self.stepper
        if stepper is None:
            self.requests.refuse(request, "engine_dead", "the engine died", LOADING_RETRY)
            return
        if message.adapter is not None and message.adapter not in stepper.numbers:
            self.requests.refuse(request, "unknown_adapter", f"adapter {message.adapter!r} is not known any more")
            return
        try:
            check_request(ids, params, self._tokenizer, stepper.ready.vocabulary, stepper.ready.max_model_len)
            stepper.add(
                Request(
                    request.key,
                    message.prompt,
                    ids,
                    params,
                    message.adapter,
                    message.priority,
                    message.deadline_seconds,
                ),
                request.stream,
            )
        except RequestError as error:
            self.requests.refuse(request, "invalid_request", str(error)[:4096], how="refused")
            return
        request.admitted = True
        request.prompt_tokens = len(ids)
        self.connections.say(request.client, Accepted(request.request_id, len(ids)))

    def encoded(self) -> None:
        """Take the outcomes of the encoder in."""
        for key, outcome in self._encoder.take() if self._encoder is not None else ():
            entry = self._encoding.pop(key, None)
            if entry is None or self.requests.get(key) is not entry[0]:
                continue
            request, message, params = entry
            if isinstance(outcome, Exception):
                self.requests.refuse(request, "request_failed", "the prompt could not be tokenized")
                continue
            try:
                self._enqueue(request, message, params, outcome)
            except Exception:
                _log.exception("a fault while a request of client %d was queued", request.client.number)
                self._drop(request)
                self.requests.refuse(request, "request_failed", FAULT)

    def abort(self, request: OpenRequest | None) -> None:
        """End a request; nothing happens to one that is over."""
        if request is not None:
            self._drop(request)
            self.requests.aborted(request)

    def _drop(self, request: OpenRequest) -> None:
        self._encoding.pop(request.key, None)
        if request.admitted and self.stepper is not None:
            self.stepper.engine.abort(request.key)

    # -- adapters --------------------------------------------------------------------------------------------------

    def _change_adapters(self, client: Client, message: LoadAdapter | UnloadAdapter) -> None:
        refusal = self._adapter_refusal(message)
        if refusal is not None or self.stepper is None:
            code, text = refusal or ("loading", "the model is being loaded")
            self.connections.say(
                client, Error(code, text, call=message.call, retry_after=LOADING_RETRY if code == "loading" else None)
            )
            return
        self._next_ticket += 1
        self._tickets[self._next_ticket] = client, message.call, message
        if isinstance(message, LoadAdapter):
            self.stepper.read_adapter(self._next_ticket, message.name, message.path, message.replace)
        else:
            self.stepper.retire(message.name)
            self.stepper.drop_adapter(self._next_ticket, message.name)

    def _adapter_refusal(self, message: LoadAdapter | UnloadAdapter) -> tuple[ErrorCode, str] | None:
        if not self.settings.admin:
            return (
                "forbidden",
                "adapters cannot be loaded or unloaded through this server; start it with --allow-adapter-loading",
            )
        if self.stepper is None:
            return "loading", "the model is being loaded"
        if self.draining:
            return "draining", "the server is about to stop"
        known = message.name in self.stepper.known
        if isinstance(message, UnloadAdapter):
            return None if known else ("unknown_adapter", f"adapter {message.name!r} is not known")
        if self.stepper.ready.num_slots == 0:
            return (
                "adapter_error",
                "the server was started without adapter slots; start it with an adapter, or with --max-loras and "
                "--max-lora-rank",
            )
        if known and not message.replace:
            return "adapter_in_use", f"adapter {message.name!r} is there already; set replace, or choose another name"
        if any(pending.name == message.name for _, _, pending in self._tickets.values()):
            return "adapter_in_use", f"adapter {message.name!r} is being loaded or unloaded at this moment"
        if not within(message.path, self.settings.adapter_roots):
            return (
                "forbidden",
                "the path is outside the directories that adapters may be loaded from; start the server with "
                "--adapter-root",
            )
        return None

    def answered(self, answer: Answer) -> None:
        """The GPU process has read or dropped an adapter, or could not."""
        client, call, _ = self._tickets.pop(answer.ticket)
        if answer.adapter is not None and self.stepper is not None:
            self.stepper.register(answer.adapter)
        if client.gone:
            return
        if answer.problem is not None:
            self.connections.say(client, Error("adapter_error", answer.problem[:4096], call=call))
        else:
            self.connections.say(client, Done(call))

    def _adapters(self) -> list[AdapterInfo]:
        if self.stepper is None:
            return []
        slots, waiting, near = self.stepper.scheduler.slots, self.stepper.scheduler.waiting, self.stepper.in_host_memory
        infos = []
        for adapter in self.stepper.known.values():
            number = adapter.number
            where: Any = (
                "gpu"
                if slots.is_resident(number)
                else "loading"
                if slots.is_loading(number)
                else "cpu"
                if number in near
                else "disk"
            )
            infos.append(
                AdapterInfo(
                    adapter.name, adapter.rank, adapter.content, where, slots.users(number), len(waiting.of(number))
                )
            )
        return infos

    # -- ends ------------------------------------------------------------------------------------------------------

    def lose(self, client: Client) -> None:
        """A client is gone or too slow: its requests end, and their pages are free for the next plan."""
        for key in list(client.open.values()):
            request = self.requests.get(key)
            if request is not None:
                self._drop(request)
                self.requests.close(request, "aborted")

    def engine_died(self, retry_after: float | None) -> None:
        """Tell everybody that has something open."""
        self.stepper = None
        for request in self.requests.all():
            self._encoding.pop(request.key, None)
            self.requests.refuse(request, "engine_dead", "the engine died while this request was open", retry_after)
        for client, call, _ in self._tickets.values():
            if not client.gone:
                self.connections.say(
                    client, Error("engine_dead", "the engine died", call=call, retry_after=retry_after)
                )
        self._tickets.clear()


def within(path: str, roots: list[str]) -> bool:
    """Whether a path, links resolved, lies under one of the roots."""
    resolved = Path(path).resolve()
    return any(resolved.is_relative_to(Path(root).resolve()) for root in roots)


_DEFAULTS = structs.asdict(Submit("x").sampling)
