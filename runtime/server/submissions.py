"""A client's requests on their way into the engine, and out of it when they end early."""

import logging
from collections.abc import Collection
from typing import Any

from msgspec import structs

from ..api.errors import RequestError
from ..api.request import Constraint, Continuation, Request
from ..api.sampling_params import SamplingParams
from ..api.structured_outputs import StructuredOutputsParams
from ..protocol.messages import MAX_OPEN_REQUESTS, Accepted, Error, ErrorCode, Submit
from ..text.encoder_thread import INLINE_CHARACTERS, Encoder
from ..text.prompts import bad_word_ids, check_continues, check_request, too_long
from ..text.tokenizer import Tokenizer, TooManyTokens
from .connections import Client, Connections
from .grammar_requests import GrammarDesk
from .open_requests import OpenRequest, OpenRequests
from .state import ServerState
from .stepper import Stepper

_log = logging.getLogger(__name__)
_DEFAULTS = structs.asdict(Submit("x").sampling)
FAULT = "a fault in the server while this request was worked on; others are not affected"
LOADING_RETRY = 1.0
OVERLOAD_RETRY = 1.0
OWNERS_SHARE = 8


def missing_adapter(stepper: Stepper, name: str | None, content: str) -> tuple[ErrorCode, str] | None:
    """Why a request for this adapter cannot be served; None: it can be. `content`: the version that it has to be, if
    any.
    """
    if name is None:
        return None
    known = stepper.known.get(name)
    if known is None and name in stepper.ready.left_out:
        problem = stepper.ready.left_out[name]
        return "unknown_adapter", (
            f"adapter {name!r} could not be read when the engine was started again ({problem}); mend its directory and "
            "load it"
        )
    if known is None:
        return "unknown_adapter", f"adapter {name!r} is not known; list_adapters tells which are"
    if content and known.content != content:
        return "adapter_changed", f"adapter {name!r} was replaced while its request was open; send the request again"
    return None


class Submissions:
    """Checks, tokenizes and queues requests. `encoder` is None where the model has no tokenizer."""

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        tokenizer: Tokenizer | None,
        encoder: Encoder | None,
        grammars: GrammarDesk,
        max_waiting: int,
    ) -> None:
        self._state, self._connections, self._requests = state, connections, requests
        self._tokenizer, self._encoder = tokenizer, encoder
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._encoding: dict[str, tuple[OpenRequest, Submit, SamplingParams]] = {}
        self._compiling: dict[str, tuple[OpenRequest, Submit, SamplingParams, list[int]]] = {}
        self._default_params = SamplingParams()

    def submit(self, client: Client, message: Submit) -> None:
        """Take a request in, or answer why not."""
        refusal = self._refusal(client, message)
        if refusal is not None:
            self._requests.counts["refused_total"] += 1
            self._connections.say(client, refusal)
            return
        request = self._requests.begin(client, message.request_id, message.stream, message.adapter)
        try:
            params = self._params(message)
        except RequestError as error:
            self._requests.refuse(request, "invalid_request", str(error)[:4096], how="refused")
            return
        if message.prompt_token_ids is not None:
            self._enqueue(request, message, params, message.prompt_token_ids)
        elif message.prompt is not None and self._tokenizer is not None:
            if len(message.prompt) <= INLINE_CHARACTERS or self._encoder is None:
                self._enqueue(
                    request, message, params, self._tokenizer.encode(message.prompt, message.add_special_tokens)
                )
            else:
                self._encoding[request.key] = request, message, params
                longest = 0 if self._state.stepper is None else self._state.stepper.ready.max_model_len
                self._encoder.put(
                    request.key, message.prompt, request.client.number, message.add_special_tokens, longest
                )
        else:
            text = "text needs a tokenizer, and this model has none; send prompt_token_ids"
            self._requests.refuse(request, "invalid_request", text, how="refused")

    def _refusal(self, client: Client, message: Submit) -> Error | None:
        stepper = self._state.stepper

        def error(code: ErrorCode, text: str, retry_after: float | None = None) -> Error:
            return Error(code, text, message.request_id, retry_after=retry_after)

        if message.request_id in client.open:
            return error(
                "duplicate_id", f"request_id {message.request_id!r} is open on this connection; choose another"
            )
        if self._state.draining:
            return error("draining", "the server is about to stop")
        if stepper is None:
            return error("loading", "the model is being loaded", LOADING_RETRY)
        if len(client.open) >= MAX_OPEN_REQUESTS:
            return error(
                "too_many_requests",
                f"this connection has {MAX_OPEN_REQUESTS} requests open; wait for one to end",
                OVERLOAD_RETRY,
            )
        full = self._full(stepper, client, message.owner, message.sampling.n)
        if full is not None:
            return error("overloaded", full, OVERLOAD_RETRY)
        if message.prompt is not None and self._encoder is not None and not self._encoder.has_room(message.prompt):
            return error("overloaded", "too much text waits to be tokenized", OVERLOAD_RETRY)
        if (message.prompt is None) == (message.prompt_token_ids is None):
            return error("invalid_request", "give exactly one of prompt and prompt_token_ids")
        if message.continues and not message.stream:
            return error("invalid_request", "continues needs stream=true; without it, ask for the whole answer again")
        missing = missing_adapter(stepper, message.adapter, message.adapter_content)
        return None if missing is None else error(*missing)

    def _full(self, stepper: Stepper, client: Client, owner: str, count: int) -> str | None:
        """Why so many more sequences of an owner may not wait, if they may not.

        An owner may hold as many places as are free at most (Choudhury and Hahne's dynamic threshold): one alone gets
        half of them, and the next one still finds some. All owners that one connection names may hold `OWNERS_SHARE`
        times as many, so that whatever it names, other connections find some.
        """
        free = self._max_waiting - stepper.scheduler.num_waiting - len(self._encoding) - len(self._compiling)
        if count > free:
            return "too many requests are waiting"
        if count + self._max_waiting - free <= free:  # nobody can hold more than all do
            return None
        waiting = stepper.scheduler.states.waiting
        owners = [message.owner for request, message, *_ in self._encoding.values() if request.client is client]
        owners += [message.owner for request, message, *_ in self._compiling.values() if request.client is client]
        held = waiting.held(f"{client.number}:{owner}") + owners.count(owner)
        if held + count > free:
            return (
                f"too many requests are waiting: {held} of them are this client's, what is left ({free}) is for others"
            )
        if waiting.held_by(f"{client.number}:") + len(owners) + count > OWNERS_SHARE * free:
            return "too many requests are waiting that came through this connection"
        return None

    def _params(self, message: Submit) -> SamplingParams:
        given: dict[str, Any] = structs.asdict(message.sampling)
        changed = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        asked = changed.get("structured_outputs")
        if asked is not None:
            changed["structured_outputs"] = StructuredOutputsParams(**structs.asdict(asked))
        return SamplingParams(**changed) if changed else self._default_params

    def _enqueue(self, request: OpenRequest, message: Submit, params: SamplingParams, ids: list[int]) -> None:
        """Hand a tokenized request to the engine, or to the grammars' thread first."""
        constraint = params.constraint
        if constraint is None:
            self._add(request, message, params, ids)
        elif self._grammars.has_room(constraint):
            self._compiling[request.key] = request, message, params, ids
            self._grammars.put(request.key, constraint, request.client.number)
        else:
            text = "too many schemas and grammars wait to be compiled"
            self._requests.refuse(request, "overloaded", text, OVERLOAD_RETRY, how="refused")

    def compiled(self, key: str, outcome: Constraint | Exception) -> None:
        """Take an outcome of the grammars' thread in; nothing happens to one that is nobody's any more."""
        entry = self._compiling.pop(key, None)
        if entry is None or self._requests.get(key) is not entry[0]:
            return
        request, message, params, ids = entry
        if isinstance(outcome, RequestError):
            self._requests.refuse(request, "invalid_request", str(outcome)[:4096], how="refused")
        elif isinstance(outcome, Exception):
            _log.error("a fault while a constraint was compiled", exc_info=outcome)
            self.fail(request)
        else:
            try:
                self._add(request, message, params, ids, outcome)
            except Exception:
                _log.exception("a fault while a request of client %d was queued", request.client.number)
                self.fail(request)

    def _add(
        self,
        request: OpenRequest,
        message: Submit,
        params: SamplingParams,
        ids: list[int],
        grammar: Constraint | None = None,
    ) -> None:
        """Hand a request to the engine."""
        stepper = self._state.stepper
        if stepper is None:
            self._requests.refuse(request, "engine_dead", "the engine died", LOADING_RETRY)
            return
        missing = missing_adapter(stepper, message.adapter, message.adapter_content)
        if missing is not None:
            self._requests.refuse(request, *missing)
            return
        try:
            vocabulary, longest = stepper.ready.vocabulary, stepper.ready.max_model_len
            check_request(ids, params, self._tokenizer, vocabulary, longest)
            continues = tuple(
                Continuation(so_far.token_ids, so_far.characters, so_far.finished) for so_far in message.continues
            )
            if continues:
                check_continues(continues, len(ids), params, vocabulary, longest)
                request.sent = {index: len(so_far.token_ids) for index, so_far in enumerate(continues)}
            banned = bad_word_ids(params.banned_words, self._tokenizer, vocabulary)
            stepper.add(
                Request(
                    request.key,
                    message.prompt,
                    ids,
                    params,
                    message.adapter,
                    message.priority,
                    message.deadline_seconds,
                    f"{request.client.number}:{message.owner}",
                    continues,
                    bad_words=banned,
                    grammar=grammar,
                ),
                request.stream,
            )
        except RequestError as error:
            self._requests.refuse(request, "invalid_request", str(error)[:4096], how="refused")
            return
        request.admitted = True
        request.prompt_tokens = len(ids)
        if message.adapter is not None:
            request.adapter_content = stepper.known[message.adapter].content
        self._connections.say(request.client, Accepted(request.request_id, len(ids), request.adapter_content))

    def encoded(self, key: str, outcome: list[int] | Exception) -> None:
        """Take an outcome of the encoder in; nothing happens to one that is nobody's any more."""
        entry = self._encoding.pop(key, None)
        if entry is None or self._requests.get(key) is not entry[0]:
            return
        request, message, params = entry
        stepper = self._state.stepper
        if isinstance(outcome, TooManyTokens) and stepper is not None:
            problem = too_long(outcome.tokens, stepper.ready.max_model_len)
            self._requests.refuse(request, "invalid_request", str(problem), how="refused")
            return
        if isinstance(outcome, Exception):
            self._requests.refuse(request, "request_failed", "the prompt could not be tokenized")
            return
        try:
            self._enqueue(request, message, params, outcome)
        except Exception:
            _log.exception("a fault while a request of client %d was queued", request.client.number)
            self.fail(request)

    def abort(self, request: OpenRequest | None) -> None:
        """End a request; nothing happens to one that is over."""
        if request is not None:
            self._drop(request)
            self._requests.aborted(request)

    def fail(self, request: OpenRequest, text: str = FAULT) -> None:
        """End a request with which the server's own code failed, or a step did not return."""
        self._drop(request)
        self._requests.refuse(request, "request_failed", text)

    def lose(self, client: Client) -> None:
        """A client is gone or too slow: its requests end, and their pages are free for the next plan."""
        for key in list(client.open.values()):
            request = self._requests.get(key)
            if request is not None:
                self._drop(request)
                self._requests.close(request, "aborted")

    def engine_died(self, retry_after: float | None, going_on: Collection[str] = ()) -> None:
        """Tell every client that has a request open, but for those (by key) that go on in the engine's next life."""
        for request in self._requests.all():
            if request.key in going_on:
                continue
            if not request.admitted:
                self._drop(request)
            self._requests.refuse(request, "engine_dead", "the engine died while this request was open", retry_after)

    def _drop(self, request: OpenRequest) -> None:
        if self._compiling.pop(request.key, None) is not None:
            self._grammars.discard(request.key)
        if self._encoding.pop(request.key, None) is not None and self._encoder is not None:
            self._encoder.discard(request.key)
        if request.admitted and self._state.stepper is not None:
            self._state.stepper.engine.abort(request.key)
