"""Dispatch clients' messages and answer them. An error in a message affects only its sender."""

import itertools
import logging
import time
from functools import partial
from typing import Any

from ... import __version__
from ..api.adapter_versions import version_of
from ..api.sampling_defaults import SamplingDefaults
from ..protocol import messages as protocol
from ..protocol.chat_templates import within_limits
from ..protocol.framing import FrameError, decode_from_client
from ..protocol.messages import MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS, MAX_SHORT, NO_INSTANCE
from ..text.chat_files import DEFAULT, ChatTemplates
from ..text.encoder_thread import Encoder
from ..text.tokenizer import Tokenizer, TooManyTokens
from .adapter_requests import AdapterRequests
from .connections import MAX_BAD_FRAMES, ClientConnection, Connections
from .open_requests import OpenRequests
from .server_state import ServerState
from .settings import ServeSettings
from .stepper import Stepper
from .submissions import LOADING_RETRY, OVERLOAD_RETRY, SERVER_ERROR, Submissions
from .updates.requests import UpdateRequests

_log = logging.getLogger(__name__)
CHARACTERS_PER_TOKEN = 8
PAUSED = "the request was aborted because the server was paused; send it again"


class TokenizeRequests:
    """Tokenizes and detokenizes for clients in the encoder's thread. Both arguments are None without a tokenizer."""

    def __init__(self, connections: Connections, tokenizer: Tokenizer | None, encoder: Encoder | None) -> None:
        self._connections, self._tokenizer, self._encoder = connections, tokenizer, encoder
        self._calls: dict[str, tuple[ClientConnection, int]] = {}
        self._numbers = itertools.count()

    def start(self, client: ClientConnection, message: protocol.Tokenize | protocol.Detokenize) -> None:
        """Queue the work, or send an error."""
        if self._tokenizer is None or self._encoder is None:
            self._connections.send_error(client, "invalid_request", "this model has no tokenizer", call=message.call)
            return
        if isinstance(message, protocol.Tokenize):
            work: partial[Any] = partial(_tokens, self._tokenizer, message)
            size = len(message.text)
        else:
            work = partial(self._tokenizer.decode, message.token_ids, message.skip_special_tokens)
            size = CHARACTERS_PER_TOKEN * len(message.token_ids)
        if not self._encoder.has_room_for(size):
            text = "too much text waits to be tokenized"
            self._connections.send_error(client, "overloaded", text, call=message.call, retry_after=OVERLOAD_RETRY)
            return
        key = f"call {next(self._numbers)}"
        self._calls[key] = client, message.call
        self._encoder.put_work(key, work, size, client.number)

    def finish(self, key: str, result: list[int] | protocol.Tokens | str | Exception) -> bool:
        """Send the encoder's result to its client; returns False if the key belongs to no call."""
        entry = self._calls.pop(key, None)
        if entry is None:
            return False
        client, call = entry
        if isinstance(result, TooManyTokens) or (isinstance(result, str) and len(result) > MAX_PROMPT_CHARACTERS):
            text = f"the answer has more than {MAX_PROMPT_TOKENS} tokens or {MAX_PROMPT_CHARACTERS} characters"
            self._connections.send_error(client, "invalid_request", text, call=call)
        elif isinstance(result, Exception):
            self._connections.send_error(client, "request_failed", "the text could not be tokenized", call=call)
        elif isinstance(result, str):
            self._connections.send(client, protocol.Text(call, result))
        elif isinstance(result, protocol.Tokens):
            self._connections.send(client, result)
        return True


def _tokens(tokenizer: Tokenizer, message: protocol.Tokenize) -> protocol.Tokens:
    """Return the answer to a call. Raises TooManyTokens."""
    offsets: list[int] = []
    if message.offsets:
        ids, offsets = tokenizer.encode_with_offsets(message.text, message.add_special_tokens, MAX_PROMPT_TOKENS)
    else:
        ids = tokenizer.encode(message.text, message.add_special_tokens, MAX_PROMPT_TOKENS)
    spellings = list(map(tokenizer.spelling, ids)) if message.spellings else []
    if sum(len(each.encode()) for each in spellings) > MAX_PROMPT_CHARACTERS:
        raise TooManyTokens(len(ids))
    return protocol.Tokens(message.call, ids, spellings, offsets)


class PauseRequests:
    """Pauses and resumes the planning of steps for clients. `admin`: they may do that."""

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        submissions: Submissions,
        admin: bool,
    ) -> None:
        self._state, self._connections, self._requests = state, connections, requests
        self._submissions, self._admin = submissions, admin
        self._unanswered: list[tuple[ClientConnection, int]] = []

    def change(self, client: ClientConnection, message: protocol.Pause | protocol.Resume) -> None:
        """Pause or resume, or send an error."""
        if not self._admin:
            text = "clients cannot pause this server; start it with --allow-adapter-loading"
            self._connections.send_error(client, "forbidden", text, call=message.call)
            return
        self._state.set_paused(isinstance(message, protocol.Pause))
        if isinstance(message, protocol.Pause) and message.abort:
            for request in self._requests.all():
                self._submissions.fail(request, PAUSED, "aborted")
        self._unanswered.append((client, message.call))
        self.answer()

    def answer(self) -> None:
        """Answer all calls if no step runs, or if steps are planned again."""
        stepper = self._state.stepper
        if self._state.paused and stepper is not None and stepper.in_flight:
            return
        for client, call in self._unanswered:
            self._connections.send(client, protocol.Done(call))
        self._unanswered.clear()


class MessageRouter:
    """Decodes frames, checks instance and hello, and passes messages on.

    `templates` and `sampling_defaults` are sent to clients in `welcome`; `has_tokenizer`: prompts may be text.
    """

    def __init__(
        self,
        settings: ServeSettings,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        submissions: Submissions,
        adapters: AdapterRequests,
        updates: UpdateRequests,
        tokenize: TokenizeRequests,
        pauses: PauseRequests,
        templates: ChatTemplates,
        has_tokenizer: bool,
        sampling_defaults: SamplingDefaults,
    ) -> None:
        self._settings, self._state = settings, state
        self._connections, self._requests = connections, requests
        self._submissions, self._adapters, self._updates = submissions, adapters, updates
        self._tokenize, self._pauses = tokenize, pauses
        self._templates, self._has_tokenizer = within_limits(templates), has_tokenizer
        self._defaults = sampling_defaults
        self._bad_frames = 0

    def receive(self, identity: bytes, data: bytes) -> None:
        """Handle a message of the connection `identity`: its frame, empty for a message of several frames.

        Never raises, whatever a client sends.
        """
        client = self._connections.client_of(identity)
        if client is None:
            return
        try:
            if not data:
                raise FrameError("bad_frame", "a message must be exactly one frame that is not empty")
            frame = decode_from_client(data)
        except FrameError as error:
            self._bad_frames += 1
            client.bad_frames += 1
            if client.bad_frames <= MAX_BAD_FRAMES:
                self._connections.send_error(client, error.code, str(error), error.request_id, error.call)
            return
        client.bad_frames = 0
        message = frame.message
        if isinstance(message, protocol.Hello):
            self._receive_hello(client)
        elif isinstance(message, protocol.GetHealth):
            self._connections.send(client, self._state.health(message.call))
        elif frame.instance != self._connections.instance and frame.instance != NO_INSTANCE:
            client.greeted = False
            self._submissions.abort_all(client)
            text = "the engine was restarted and its requests are lost; send hello again"
            self._connections.send_error(client, "wrong_instance", text)
        elif not client.greeted:
            self._connections.send_error(client, "hello_first", "this connection is not known; send hello first")
        else:
            self._dispatch(client, message)

    def _dispatch(self, client: ClientConnection, message: protocol.Message) -> None:
        try:
            if isinstance(message, protocol.Submit):
                self._submissions.submit(client, message)
            elif isinstance(message, protocol.Abort):
                for each in message.request_ids:
                    self._submissions.abort(self._requests.get(client.open.get(each, "")))
            elif isinstance(message, protocol.UnloadAdapter) and version_of(message.name):
                self._updates.unload(client, message)
            elif isinstance(message, protocol.OpenBuffer):
                self._updates.open_buffer(client, message)
            elif isinstance(message, protocol.UpdateAdapter):
                self._updates.update(client, message)
            elif isinstance(message, (protocol.LoadAdapter, protocol.UnloadAdapter)):
                self._adapters.change(client, message)
            elif isinstance(message, protocol.ListAdapters):
                self._connections.send(client, self._adapters.list(message))
            elif isinstance(message, (protocol.Tokenize, protocol.Detokenize)):
                self._tokenize.start(client, message)
            elif isinstance(message, protocol.GetChatTemplates):
                self._connections.send(client, self._adapters.chat_templates(message))
            elif isinstance(message, (protocol.Pause, protocol.Resume)):
                self._pauses.change(client, message)
            elif isinstance(message, protocol.GetStats):
                self._connections.send(client, protocol.Stats(message.call, self._stats()))
        except Exception:
            _log.exception("a message of client %d could not be handled", client.number)
            request_id, call = getattr(message, "request_id", None), getattr(message, "call", None)
            request = self._requests.get(client.open.get(request_id, "")) if request_id is not None else None
            if request is not None:
                self._submissions.fail(request)
            else:
                self._connections.send_error(client, "request_failed", SERVER_ERROR, request_id, call)

    def _receive_hello(self, client: ClientConnection) -> None:
        for key in list(client.open.values()):
            self._submissions.abort(self._requests.get(key))
        if self._state.stepper is None:
            self._connections.send_error(client, "loading", "the model is being loaded", retry_after=LOADING_RETRY)
            return
        client.greeted = True
        self._connections.send(client, self._welcome(self._state.stepper))

    def _welcome(self, stepper: Stepper) -> protocol.Welcome:
        ready, templates, tokens = stepper.ready, self._templates.templates, self._templates.tokens
        return protocol.Welcome(
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
            dtype=ready.dtype,
            max_logprobs=ready.max_logprobs,
            logprobs_mode=ready.logprobs_mode,
            eos_token_ids=ready.eos_ids,
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
            "paused": int(self._state.paused),
            "tensor_parallel_size": int(self._settings.llm.get("tensor_parallel_size") or 1),
        }
        values |= self._requests.counts
        return values if self._state.stepper is None else values | self._state.stepper.stats()
