"""What clients ask for, one message at a time.

Whatever is wrong with a message is answered to its sender and concerns nobody else.
"""

import logging
import time

from ... import __version__
from ..api.sampling_defaults import SamplingDefaults
from ..protocol.framing import FrameError, decode_from_client
from ..protocol.messages import (
    MAX_SHORT,
    NO_INSTANCE,
    Abort,
    Adapters,
    Detokenize,
    Error,
    GetChatTemplates,
    GetHealth,
    GetStats,
    Hello,
    ListAdapters,
    LoadAdapter,
    Message,
    Stats,
    Submit,
    Tokenize,
    UnloadAdapter,
    Welcome,
)
from ..protocol.templates import fitting
from ..text.chat_files import DEFAULT, ChatTemplates
from .adapter_requests import AdapterDesk
from .connections import MAX_FAULTS, Client, Connections
from .open_requests import OpenRequests
from .settings import ServeSettings
from .state import ServerState
from .stepper import Stepper
from .submissions import FAULT, LOADING_RETRY, Submissions
from .tokenize_requests import TokenDesk

_log = logging.getLogger(__name__)


class FrontDesk:
    """Reads the clients' messages, and answers them or passes them on.

    `templates`: the model's chat templates, which clients receive, as are `sampling_defaults`; `has_tokenizer`: whether
    prompts may be text.
    """

    def __init__(
        self,
        settings: ServeSettings,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        submissions: Submissions,
        adapters: AdapterDesk,
        tokens: TokenDesk,
        templates: ChatTemplates,
        has_tokenizer: bool,
        sampling_defaults: SamplingDefaults,
    ) -> None:
        self._settings, self._state = settings, state
        self._connections, self._requests = connections, requests
        self._submissions, self._adapters, self._tokens = submissions, adapters, tokens
        self._templates, self._has_tokenizer = fitting(templates), has_tokenizer
        self._defaults = sampling_defaults
        self._bad_frames = 0

    def receive(self, identity: bytes, data: bytes) -> None:
        """One message of the listener: the connection's id, and the frame (empty: a message that was not one frame).

        Never raises for anything that a client can send.
        """
        client = self._connections.heard(identity)
        if client is None:
            return
        try:
            if not data:
                raise FrameError("bad_frame", "a message is exactly one frame, and that is not empty")
            frame = decode_from_client(data)
        except FrameError as error:
            self._fault(client, error)
            return
        client.faults = 0
        message = frame.message
        if isinstance(message, Hello):
            self._hello(client)
        elif isinstance(message, GetHealth):
            self._connections.say(client, self._state.health(message.call))
        elif frame.instance != self._connections.instance and frame.instance != NO_INSTANCE:
            client.greeted = False
            self._submissions.lose(client)
            self._connections.say(
                client, Error("wrong_instance", "the engine was restarted; its requests are lost; say hello again")
            )
        elif not client.greeted:
            self._connections.say(client, Error("hello_first", "this connection is not known; say hello first"))
        else:
            self._serve(client, message)

    def _fault(self, client: Client, error: FrameError) -> None:
        self._bad_frames += 1
        client.faults += 1
        if client.faults <= MAX_FAULTS:
            self._connections.say(client, Error(error.code, str(error)[:4096], error.request_id, error.call))

    def _serve(self, client: Client, message: Message) -> None:
        request_id, call = getattr(message, "request_id", None), getattr(message, "call", None)
        try:
            if isinstance(message, Submit):
                self._submissions.submit(client, message)
            elif isinstance(message, Abort):
                for each in message.request_ids:
                    self._submissions.abort(self._requests.get(client.open.get(each, "")))
            elif isinstance(message, (LoadAdapter, UnloadAdapter)):
                self._adapters.change(client, message)
            elif isinstance(message, ListAdapters):
                self._connections.say(client, Adapters(message.call, self._adapters.infos()))
            elif isinstance(message, (Tokenize, Detokenize)):
                self._tokens.ask(client, message)
            elif isinstance(message, GetChatTemplates):
                self._connections.say(client, self._adapters.chat_templates(message))
            elif isinstance(message, GetStats):
                self._connections.say(client, Stats(message.call, self._stats()))
        except Exception:
            _log.exception("a fault while a message of client %d was served", client.number)
            request = self._requests.get(client.open.get(request_id, "")) if request_id is not None else None
            if request is not None:
                self._submissions.fail(request)
            else:
                self._connections.say(client, Error("request_failed", FAULT, request_id, call))

    def _hello(self, client: Client) -> None:
        for key in list(client.open.values()):
            self._submissions.abort(self._requests.get(key))
        if self._state.stepper is None:
            self._connections.say(client, Error("loading", "the model is being loaded", retry_after=LOADING_RETRY))
            return
        client.greeted = True
        self._connections.say(client, self._welcome(self._state.stepper))

    def _welcome(self, stepper: Stepper) -> Welcome:
        ready, templates, tokens = stepper.ready, self._templates.templates, self._templates.tokens
        return Welcome(
            server_version=__version__,
            model=self._settings.served_model_name[:MAX_SHORT],
            vocabulary=ready.vocabulary,
            max_model_len=ready.max_model_len,
            max_num_seqs=ready.max_num_seqs,
            max_adapter_slots=ready.num_slots,
            has_tokenizer=self._has_tokenizer,
            admin=self._settings.admin,
            chat_template=templates.get(DEFAULT),
            bos_token=tokens.get("bos_token", ""),
            eos_token=tokens.get("eos_token", ""),
            chat_templates={} if templates.keys() <= {DEFAULT} else dict(templates),
            special_tokens=dict(tokens),
            sampling_defaults=self._defaults,
        )

    def _stats(self) -> dict[str, int | float]:
        values: dict[str, int | float] = {
            "uptime_seconds": self._state.uptime,
            "cpu_seconds_total": time.process_time(),
            "connections": len(self._connections.clients),
            "requests_open": len(self._requests),
            "slow_readers_total": self._connections.slow_total,
            "refused_connections_total": self._connections.refused_total,
            "bad_frames_total": self._bad_frames,
        }
        values |= self._requests.counts
        return values if self._state.stepper is None else values | self._state.stepper.stats()
