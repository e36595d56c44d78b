"""What the parts of the gateway expect of each other: who answers requests (`Engines`), who may ask (`Admission`), who
watches (`Observer`), and what goes between them.

The routes know these three and nothing that implements them.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..api.sampling_defaults import SamplingDefaults
from ..api.sampling_params import SamplingParams
from ..protocol.messages import Chunk
from ..text.chat_files import ChatTemplates

HealthStatus = Literal["loading", "ok", "stalled", "draining", "idle", "dead"]


class GatewayError(Exception):
    """A request ends with this answer.

    status        HTTP status
    message       for a person: what is wrong, and the remedy; quotes no path of the server
    kind, code    OpenAI's `type` and `code`, such as "invalid_request_error" and "model_not_found"
    param         the field of the body that is at fault
    retry_after   seconds for the Retry-After header
    headers       more headers of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after = retry_after
        self.headers = dict(headers or {})


# -- engines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    """The model that is served, as its engine's `welcome` tells it.

    templates      its chat templates
    sampling_defaults  of requests that do not set these fields
    created        seconds since the epoch
    max_adapters   slots for adapters on the device
    """

    name: str
    vocabulary: int
    max_model_len: int
    has_tokenizer: bool
    templates: ChatTemplates = field(default_factory=ChatTemplates)
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # noqa: RUF009  it is frozen
    admin: bool = False
    created: int = 0
    max_adapters: int = 0


@dataclass(frozen=True)
class AdapterCard:
    """An adapter that requests may name.

    content    a hash of its config and weights
    places     engine's name -> `gpu`, `cpu`, `disk` or `loading`
    running, waiting   requests, of all engines together
    chat_template   a hash of its own chat templates, "" if it has none; None: no engine has read them yet
    """

    name: str
    rank: int
    content: str
    places: Mapping[str, str] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    chat_template: str | None = ""


@dataclass(frozen=True)
class EngineHealth:
    """How the engines are together: `ok` when one of them takes requests, `idle` when none runs and a request starts
    one; `progress` 0..1 while they load.

    `engines`: each one's name -> its own status.
    """

    status: HealthStatus
    phase: str = ""
    progress: float = 0.0
    engines: Mapping[str, HealthStatus] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt for an engine: text or token ids.

    request_id      unique among all open requests
    add_special_tokens  a text gets the special tokens that the model expects at the start; one that a chat template
                    made has them
    owner           a tag of whose it is
    when_accepted   called when an engine has taken the request, and again when another one goes on with it: with the
                    number of the prompt's tokens, and the hash of the adapter's content ("" for the base)
    direct          is offered chunks from the middle of the answer as they arrive, while the stream's next list is
                    awaited. One for which it returns True is in no list: no task is woken for it
    """

    request_id: str
    prompt: str | list[int]
    params: SamplingParams
    adapter: str | None = None
    owner: str = ""
    priority: int = 0
    deadline_seconds: float | None = None
    stream: bool = True
    when_accepted: Callable[[int, str], None] | None = None
    add_special_tokens: bool = True
    direct: Callable[[Chunk], bool] | None = None


class Engines(Protocol):
    """One or several engines that answer requests. Belongs to one asyncio loop.

    All methods raise the errors of `requests/errors.py`, or a GatewayError where the answer is known here.
    """

    async def start(self) -> None:
        """Begin to connect; returns at once, also when no engine is there yet."""

    def expect_end(self) -> None:
        """The engines are being stopped: that they go is no news from now on."""

    async def close(self) -> None:
        """End all connections; open requests fail."""

    async def model(self) -> ModelInfo:
        """The model. Raises EngineDeadError or OverloadedError while no engine has said which it is."""
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        """The answer as it grows: the chunks that arrived together, never an empty list; the last has `usage`.

        Leaving early (aclose, cancellation) aborts the request.
        """
        ...

    async def adapters(self) -> list[AdapterCard]:
        """All adapters, by name."""
        ...

    async def adapter(self, name: str) -> AdapterCard | None:
        """One of them; None: there is no such adapter."""
        ...

    async def chat_templates(self, name: str) -> ChatTemplates:
        """An adapter's own chat templates; an engine loads the adapter for it if none has."""
        ...

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        """Make a directory on the engines' machines usable as `name`, on all engines."""

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, on all engines."""

    async def health(self) -> EngineHealth:
        """How they are; raises nothing."""
        ...

    async def stats(self) -> dict[str, dict[str, int | float]]:
        """Each engine's name -> its counters and gauges; engines that do not answer are left out."""
        ...

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, as the engine makes them of a prompt."""
        ...

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        ...


# -- admission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """Who asks.

    owner    a name for logs and shares
    key_id   which of the owner's keys, "" for none
    admin    may load and unload adapters
    metrics  may read /metrics, which tells of all owners
    """

    owner: str
    key_id: str = ""
    admin: bool = False
    metrics: bool = True


@dataclass(frozen=True)
class UsageRecord:
    """What one request used, written once at its end.

    time             when it came, seconds since the epoch
    model, adapter   the base's name; the adapter's (None: the base) and the hash of its content
    output_tokens    those that the gateway received of the engine, of all completions
    first_token_seconds, total_seconds   since it came; first_token_seconds is 0 when there was none
    engine_first_token_seconds, engine_total_seconds   the same by the engine's clock, since it reached the engine; 0
                     when the engine did not say
    draft_tokens, accepted_tokens   drafts that the engine computed, and those of them that became output
    history_draft_tokens, history_accepted_tokens   of both those that came from former answers; the log has no column
                     of them
    trained_draft_tokens, trained_accepted_tokens   of both those that a trained draft made; the log has no column
                     of them
    status           the HTTP status, 499 when the client went away; an error in the middle of a stream counts with the
                     status that it would have had before
    error            OpenAI's error code, "" for none
    """

    time: float
    request_id: str
    endpoint: str
    owner: str
    key_id: str
    model: str
    adapter: str | None
    adapter_content: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token_seconds: float
    total_seconds: float
    status: int
    error: str = ""
    engine_first_token_seconds: float = 0.0
    engine_total_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    history_draft_tokens: int = 0
    history_accepted_tokens: int = 0
    trained_draft_tokens: int = 0
    trained_accepted_tokens: int = 0


class Ticket(Protocol):
    """A request that was let in.

    headers      x-ratelimit-* for the answer
    max_tokens   that each completion may have: what was asked for, or the key's limit if that is lower; None: up to
                 the model's length
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """See the class."""

    @property
    def max_tokens(self) -> int | None:
        """See the class."""

    def finish(self, record: UsageRecord) -> None:
        """The request ended, in whatever way. Called exactly once."""


class Admission(Protocol):
    """Who asks, whether they may, and what they used. All calls return at once."""

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """Whose the Authorization header is. Raises GatewayError 401."""
        ...

    def may_use(self, caller: Caller, model: str) -> bool:
        """Whether the caller may use (and see) a model or adapter; False makes it 404, as if it did not exist."""
        ...

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Ticket:
        """Let a request in.

        prompt_tokens   exact for token ids, an estimate for text; `finish` tells the exact number
        max_tokens      that each of `choices` completions may have; None: up to the model's length
        model_len       the model's greatest length, prompt and answer

        Raises GatewayError 429 with Retry-After.
        """
        ...

    def count(self, caller: Caller) -> Mapping[str, str]:
        """Let a request in that asks for no tokens, such as /tokenize; it counts as a request. Returns x-ratelimit-*
        for the answer.

        Raises GatewayError 429 with Retry-After.
        """
        ...


# -- observation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """A request for tokens that was let in. `headers` are the request's, with lower-case names, without authorization;
    `prompts`: what it asks; `add_special_tokens`: see EngineRequest.
    """

    request_id: str
    endpoint: str
    caller: Caller
    client_host: str
    model: str
    adapter: str | None
    stream: bool
    prompts: list[str | list[int]]
    params: SamplingParams
    headers: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    add_special_tokens: bool = True


@dataclass(frozen=True)
class HttpAnswer:
    """One HTTP exchange of any kind, at its end.

    route        the route's pattern, "" when there is none
    status       499: the client went away before the answer was complete
    body_bytes   of the answer, as far as it was sent
    """

    time: float
    request_id: str
    method: str
    route: str
    path: str
    status: int
    seconds: float
    body_bytes: int
    client_host: str
    owner: str


class Observer(Protocol):
    """Metrics, access log, spans. All calls but `metrics` return at once and raise nothing."""

    def begun(self, exchange: Exchange) -> None:
        """A request was let in."""

    def first_token(self, exchange: Exchange, seconds: float) -> None:
        """Its first token is here, `seconds` after the request came."""

    def arrived(self, exchange: Exchange, place: int, chunks: list[Chunk], seconds: float) -> None:
        """Chunks that arrived together, of the answer to prompt number `place`, `seconds` after those before them (or
        after the request came).
        """

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """It ended."""

    def answered(self, answer: HttpAnswer) -> None:
        """An HTTP exchange ended; also those that ask for no tokens, and those that were refused."""

    async def metrics(self, engines: Engines) -> tuple[str, bytes]:
        """The content type and the body of `/metrics`."""
        ...
