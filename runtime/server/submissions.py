"""Submit clients' requests to the engine: check, tokenize, compile constraints, queue; and end them early."""

import logging
from collections.abc import Collection
from functools import partial
from importlib.util import find_spec
from typing import Any

from msgspec import structs

from ..api.adapter_sum import sum_name
from ..api.errors import RequestError, some_of
from ..api.request import Constraint, Continuation, PageOffer, Request
from ..api.sampling_params import SamplingParams
from ..api.structured_outputs import StructuredOutputsParams
from ..protocol.messages import MAX_OPEN_REQUESTS, Accepted, Error, ErrorCode, Submit
from ..text.encoder_thread import INLINE_CHARACTERS, Encoder, TextThread
from ..text.prompts import bad_word_ids, check_continues, check_request, check_scored, too_long, with_logprob_counts
from ..text.structured.grammar_compiler import GrammarCompiler
from ..text.tokenizer import Tokenizer, TooManyTokens
from .connections import ClientConnection, Connections
from .gpu_link import LOST_UPDATE, Ready
from .open_requests import OpenRequest, OpenRequests
from .server_state import ServerState
from .stepper import Stepper

_log = logging.getLogger(__name__)
_DEFAULTS = structs.asdict(Submit("x").sampling)
PREFILL = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""The engine's last step samples a token, which is dropped."""
SERVER_ERROR = "an error in the server ended this request; others are not affected"
LOADING_RETRY = 1.0
OVERLOAD_RETRY = 1.0
MAX_SHARES_PER_CONNECTION = 8
_PREPARE = "prepare"


def missing_adapter(stepper: Stepper, name: str | None, content: str) -> tuple[ErrorCode, str] | None:
    """Return why requests for this adapter cannot be served, or None. `content`: the required version, "" for any."""
    if name is None:
        return None
    numbers = stepper.adapter_numbers
    for part, _ in numbers.parts(name):
        if part in stepper.adapters:
            continue
        if part in stepper.ready.left_out:
            problem = stepper.ready.left_out[part]
            if problem == LOST_UPDATE:
                return "adapter_changed", f"adapter {part!r}: {problem}"
            return "unknown_adapter", (
                f"adapter {part!r} could not be read when the engine started ({problem}); repair its directory and "
                "load it"
            )
        if part in numbers.named:
            return "invalid_request", f"adapter {part!r} is a sum; name its adapters and their weights instead"
        known = some_of([*stepper.adapters, *numbers.named])
        return "unknown_adapter", f"adapter {part!r} is not known (known: {known}); list_adapters lists all"
    if content and numbers.content(name) != content:
        return "adapter_changed", f"adapter {name!r} was replaced while its request was open; send the request again"
    return None


def _with_sum_name(message: Submit) -> Submit:
    """Return a request with the name of its sum in `adapter`. Raises RequestError."""
    if message.adapter is not None:
        raise RequestError("adapter and adapters both name adapters; give one of them")
    name = sum_name([(each.name, each.weight) for each in message.adapters], "adapters")
    return structs.replace(message, adapter=name, adapters=[])


def _offer(message: Submit) -> PageOffer | None:
    """Return the pages that a request brings with it."""
    pages = message.kv_pages
    return None if pages is None else PageOffer(pages.source, tuple(pages.places), pages.cached_tokens)


class GrammarQueue(TextThread):
    """Compiles constraints in a thread, apart from the batcher's loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__("sidestream-grammars")
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None

    def prepare(self, ready: Ready) -> None:
        """Set the model's sizes and read its vocabulary, so that no request waits for that."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer, ready.vocabulary, ready.eos_ids)
            if self._tokenizer is not None and find_spec("llguidance") is not None:
                self.put_work(_PREPARE, self._compiler.prepare, 0, None)

    def put(self, key: str, params: StructuredOutputsParams, owner: int) -> None:
        """Queue a constraint, after `prepare`. Its result has this `key`."""
        if self._compiler is None:
            raise RuntimeError("a constraint arrived before the model was ready")
        self.put_work(key, partial(self._compiler.compile, params), len(params.text), owner)

    def take(self) -> list[tuple[str, Any]]:
        """Return (key, Grammar or exception) of the constraints that are done."""
        return [(key, result) for key, result in super().take() if key != _PREPARE]

    def close(self) -> None:
        super().close()
        if self._compiler is not None:
            self._compiler.close()


class Submissions:
    """Requests before they are in the engine. `encoder` is None if the model has no tokenizer."""

    def __init__(
        self,
        state: ServerState,
        connections: Connections,
        requests: OpenRequests,
        tokenizer: Tokenizer | None,
        encoder: Encoder | None,
        grammars: GrammarQueue,
        max_waiting: int,
    ) -> None:
        self._state, self._connections, self._requests = state, connections, requests
        self._tokenizer, self._encoder = tokenizer, encoder
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._encoding: dict[str, tuple[OpenRequest, Submit, SamplingParams]] = {}
        self._compiling: dict[str, tuple[OpenRequest, Submit, SamplingParams, list[int]]] = {}
        self._default_params = SamplingParams()

    def submit(self, client: ClientConnection, message: Submit) -> None:
        """Accept a request or send an error."""
        refusal: Error | None = None
        if message.adapters:
            try:
                message = _with_sum_name(message)
            except RequestError as error:
                refusal = Error("invalid_request", str(error), message.request_id)
        refusal = refusal or self._refusal(client, message)
        if refusal is not None:
            self._requests.counts["refused_total"] += 1
            self._requests.counts["overloaded_total"] += refusal.code == "overloaded"
            self._connections.send(client, refusal)
            return
        stream = message.stream and not message.prefill_only
        request = self._requests.open(client, message.request_id, stream, message.adapter)
        request.prefill_only = message.prefill_only
        try:
            params = PREFILL if message.prefill_only else self._params(message)
        except RequestError as error:
            self._requests.refuse(request, "invalid_request", str(error), how="refused")
            return
        if message.prompt_token_ids is not None:
            self._compile_or_add(request, message, params, message.prompt_token_ids)
        elif message.prompt is not None and self._tokenizer is not None:
            if len(message.prompt) <= INLINE_CHARACTERS or self._encoder is None:
                ids = self._tokenizer.encode(message.prompt, message.add_special_tokens)
                self._compile_or_add(request, message, params, ids)
            else:
                self._encoding[request.key] = request, message, params
                longest = 0 if self._state.stepper is None else self._state.stepper.ready.max_model_len
                self._encoder.put(
                    request.key, message.prompt, request.client.number, message.add_special_tokens, longest
                )
        else:
            text = "text needs a tokenizer, and this model has none; send prompt_token_ids"
            self._requests.refuse(request, "invalid_request", text, how="refused")

    def _refusal(self, client: ClientConnection, message: Submit) -> Error | None:
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
        overload = self._overload(stepper, client, message.owner, message.sampling.n)
        if overload is not None:
            return error("overloaded", overload, OVERLOAD_RETRY)
        if message.prompt is not None and self._encoder is not None and not self._encoder.has_room(message.prompt):
            return error("overloaded", "too much text waits to be tokenized", OVERLOAD_RETRY)
        if (message.prompt is None) == (message.prompt_token_ids is None):
            return error("invalid_request", "give exactly one of prompt and prompt_token_ids")
        if message.scored and message.prompt_token_ids is None:
            return error("invalid_request", "scored needs prompt_token_ids, whose tokens it names")
        if message.continues and not message.stream:
            return error("invalid_request", "continues needs stream=true; without it, request the whole answer again")
        if message.prefill_only and stepper.ready.kv_role != "prefill":
            return error("invalid_request", "prefill_only needs a prefill engine; leave it out, or name another engine")
        missing = missing_adapter(stepper, message.adapter, message.adapter_content)
        return None if missing is None else error(*missing)

    def _overload(self, stepper: Stepper, client: ClientConnection, owner: str, count: int) -> str | None:
        """Return why `count` more sequences of an owner may not wait, or None.

        An owner may hold at most as many places as are free (Choudhury and Hahne's dynamic threshold): a single owner
        gets half of them, and another one still finds some. All owners of a connection together may hold
        `MAX_SHARES_PER_CONNECTION` times as many, so that other connections find some.
        """
        free = self._max_waiting - stepper.scheduler.num_waiting - len(self._encoding) - len(self._compiling)
        if count > free:
            return "too many requests are waiting"
        if count + self._max_waiting - free <= free:  # all owners together hold less than one may
            return None
        waiting = stepper.scheduler.states.waiting
        owners = [message.owner for request, message, *_ in self._encoding.values() if request.client is client]
        owners += [message.owner for request, message, *_ in self._compiling.values() if request.client is client]
        held = waiting.held(f"{client.number}:{owner}") + owners.count(owner)
        if held + count > free:
            return f"too many requests are waiting: {held} are this client's; the {free} free places are for others"
        if waiting.held_by(f"{client.number}:") + len(owners) + count > MAX_SHARES_PER_CONNECTION * free:
            return "too many requests of this connection are waiting"
        return None

    def _params(self, message: Submit) -> SamplingParams:
        given: dict[str, Any] = structs.asdict(message.sampling)
        changed = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        structured = changed.get("structured_outputs")
        if structured is not None:
            changed["structured_outputs"] = StructuredOutputsParams(**structs.asdict(structured))
        if message.sampling.receipt and self._state.receipts is None:
            raise RequestError("receipt=true needs a server with a key for it; start it with --receipt-key FILE")
        return SamplingParams(**changed) if changed else self._default_params

    def _compile_or_add(self, request: OpenRequest, message: Submit, params: SamplingParams, ids: list[int]) -> None:
        """Add a tokenized request to the engine, or compile its constraint first."""
        constraint = params.constraint
        if constraint is None:
            self._add(request, message, params, ids)
        elif self._grammars.has_room_for(len(constraint.text)):
            self._compiling[request.key] = request, message, params, ids
            self._grammars.put(request.key, constraint, request.client.number)
        else:
            text = "too many schemas and grammars wait to be compiled"
            self._requests.refuse(request, "overloaded", text, OVERLOAD_RETRY, how="refused")

    def constraint_compiled(self, key: str, result: Constraint | Exception) -> None:
        """Continue a request with its compiled constraint, unless it has ended."""
        entry = self._compiling.pop(key, None)
        if entry is None or self._requests.get(key) is not entry[0]:
            return
        request, message, params, ids = entry
        if isinstance(result, RequestError):
            self._requests.refuse(request, "invalid_request", str(result), how="refused")
        elif isinstance(result, Exception):
            _log.error("a constraint could not be compiled", exc_info=result)
            self.fail(request)
        else:
            self._guarded(request, self._add, message, params, ids, result)

    def prompt_encoded(self, key: str, result: list[int] | Exception) -> None:
        """Continue a request with its token ids, unless it has ended."""
        entry = self._encoding.pop(key, None)
        if entry is None or self._requests.get(key) is not entry[0]:
            return
        request, message, params = entry
        stepper = self._state.stepper
        if isinstance(result, TooManyTokens) and stepper is not None:
            problem = too_long(result.tokens, stepper.ready.max_model_len)
            self._requests.refuse(request, "invalid_request", str(problem), how="refused")
        elif isinstance(result, Exception):
            self._requests.refuse(request, "request_failed", "the prompt could not be tokenized")
        else:
            self._guarded(request, self._compile_or_add, message, params, result)

    def _guarded(self, request: OpenRequest, work: Any, *arguments: Any) -> None:
        """Call `work(request, *arguments)`; an exception ends this request only."""
        try:
            work(request, *arguments)
        except Exception:
            _log.exception("a request of client %d could not be queued", request.client.number)
            self.fail(request)

    def _add(
        self,
        request: OpenRequest,
        message: Submit,
        params: SamplingParams,
        ids: list[int],
        grammar: Constraint | None = None,
    ) -> None:
        """Add a request to the engine, or refuse it."""
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
            params = with_logprob_counts(params, stepper.ready.max_logprobs, vocabulary)
            continues = tuple(
                Continuation(so_far.token_ids, so_far.characters, so_far.finished) for so_far in message.continues
            )
            if continues:
                check_continues(continues, len(ids), params, vocabulary, longest)
                request.sent = {index: len(so_far.token_ids) for index, so_far in enumerate(continues)}
            if message.scored:
                check_scored(message.scored, len(ids), params)
            banned = bad_word_ids(params.banned_words, self._tokenizer, vocabulary)
            stepper.engine.add(
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
                    scored=tuple(message.scored),
                    offer=_offer(message),
                    prefill_only=message.prefill_only,
                ),
                request.stream,
            )
        except RequestError as error:
            self._requests.refuse(request, "invalid_request", str(error), how="refused")
            return
        request.admitted = True
        request.prompt_tokens = len(ids)
        if message.adapter is not None:
            request.adapter_content = stepper.adapter_numbers.content(message.adapter)
        receipts = self._state.receipts
        if receipts is not None and (params.receipt or receipts.for_all):
            request.make_receipt = partial(receipts.make, params, request.adapter_content)
        self._connections.send(request.client, Accepted(request.request_id, len(ids), request.adapter_content))

    def abort(self, request: OpenRequest | None) -> None:
        """Abort a request; does nothing for None."""
        if request is not None:
            self._drop(request)
            self._requests.abort(request)

    def fail(self, request: OpenRequest, text: str = SERVER_ERROR, code: ErrorCode = "request_failed") -> None:
        """End a request after an error of the server, a step that did not return, or a pause."""
        self._drop(request)
        self._requests.refuse(request, code, text)

    def abort_all(self, client: ClientConnection) -> None:
        """Abort all requests of a client that disconnected or is too slow, without an answer."""
        for key in list(client.open.values()):
            request = self._requests.get(key)
            if request is not None:
                self._drop(request)
                self._requests.close(request, "aborted")

    def engine_died(self, retry_after: float | None, resubmitted: Collection[str] = ()) -> None:
        """End all requests with an error, except those with a key in `resubmitted`."""
        for request in self._requests.all():
            if request.key in resubmitted:
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
