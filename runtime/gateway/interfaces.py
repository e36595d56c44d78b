"""Interfaces between the parts of the gateway, and the data that they exchange.

`Engines` answers requests, `Admission` authenticates and limits clients, `Observer` receives events. The endpoints use
these protocols, not the implementations.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..api.adapter_sum import SUM_PATH
from ..api.request import Continuation
from ..api.sampling_defaults import SamplingDefaults
from ..api.sampling_params import DEFAULT_MAX_LOGPROBS, RAW_LOGPROBS, SamplingParams
from ..protocol.messages import Chunk
from ..text.chat_files import ChatTemplates
from ..text.scoring import ScoreRequest

KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""Headers that may have the API key: OpenAI's, Anthropic's and Azure's. The first of them counts."""
HealthStatus = Literal["loading", "ok", "stalled", "draining", "idle", "dead"]
PauseMode = Literal["abort", "wait", "keep"]
"""What happens to open requests: they end with an error, are finished first, or wait for the end of the pause."""


@dataclass(eq=False)
class GatewayError(Exception):
    """An HTTP error response.

    status        HTTP status
    message       what is wrong and what to do; must not contain paths of the server
    kind, code    OpenAI's `type` and `code`, such as "invalid_request_error" and "model_not_found"
    param         field of the body that is wrong
    retry_after   Retry-After header in seconds
    headers       additional headers
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


# -- engines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    """The served model, from the `welcome` message of its engine.

    sampling_defaults  values of fields that a request does not set
    created            seconds since the epoch
    max_adapters       adapter slots on the device
    dtype              of hidden states, such as `torch.bfloat16`
    logprobs_mode      of sampled tokens: raw_logprobs or processed_logprobs
    max_logprobs       largest `logprobs` and `prompt_logprobs` of a request
    eos_token_ids      tokens that end an answer
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
    dtype: str = ""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    logprobs_mode: str = RAW_LOGPROBS
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AdapterCard:
    """An adapter that requests may name.

    content            hash of its config and weights
    places             engine name -> `gpu`, `cpu`, `disk` or `loading`
    running, waiting   requests of all engines
    chat_template      hash of its own chat templates, "" for none; None: no engine has read them yet
    path               directory from which a client loaded it, "" for others; for admins only
    """

    name: str
    rank: int
    content: str
    places: Mapping[str, str] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    chat_template: str | None = ""
    path: str = ""

    @property
    def is_sum(self) -> bool:
        """Whether it is a name of a sum of adapters."""
        return self.path.startswith(SUM_PATH)


@dataclass(frozen=True)
class AdapterUpload:
    """The bytes of an adapter's update, a safetensors file.

    nbytes    size of all parts
    parts     checked as far as the gateway can; may raise GatewayError and ClientDisconnect
    version   above the last one; None: the last one + 1
    inflight  what running requests do, see `update_adapter`
    """

    nbytes: int
    parts: AsyncGenerator[bytes]
    version: int | None = None
    inflight: Literal["pin", "switch"] = "pin"


@dataclass(frozen=True)
class UpdatedAdapter:
    """An applied update. `updated`: number of engines that have it; `failed`: engine -> why it does not."""

    version: int
    content: str
    updated: int = 1
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GatewayHealth:
    """Health of all engines: `ok` if at least one accepts requests, `idle` if none runs and a request starts one.

    progress   0..1 while the engines load
    engines    engine name -> its status
    """

    status: HealthStatus
    phase: str = ""
    progress: float = 0.0
    engines: Mapping[str, HealthStatus] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt for an engine: text or token ids.

    request_id          unique among open requests
    owner               tag for fair scheduling
    when_accepted       called when an engine accepts the request, and again when another engine continues it; its
                        arguments are the number of prompt tokens and the adapter's content hash ("" for the base model)
    add_special_tokens  add the special tokens that the model expects at the start of a text; False for text from a chat
                        template, which contains them
    direct              called with chunks from the middle of the answer as they arrive, while the consumer awaits the
                        next list. If it returns True, the chunk is not put into a list, and no task is woken for it
    scored              ranges of prompt tokens that earlier answers sampled; `prompt_logprobs` are of these only
    continues           earlier output of each completion, which the chunks continue
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
    scored: Sequence[tuple[int, int]] = ()
    continues: Sequence[Continuation] = ()


class Engines(Protocol):
    """One or several engines of one model. Belongs to one asyncio loop.

    All methods may raise the errors of `runtime/api/errors.py` or GatewayError.
    """

    async def start(self) -> None:
        """Start to connect. Returns at once, even if no engine runs."""

    def expect_shutdown(self) -> None:
        """Refuse new requests with `draining`, and report that status: the server is shutting down."""

    async def close(self) -> None:
        """Close all connections. Open requests fail."""

    async def model(self) -> ModelInfo:
        """Return the model. Raises EngineDeadError or OverloadedError while no engine has reported it."""
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        """Yield the answer's chunks in lists that arrived together, never empty; the last chunk has `usage`.

        Closing or cancelling the generator aborts the request.
        """
        ...

    async def adapters(self) -> list[AdapterCard]:
        """Return all adapters, sorted by name."""
        ...

    async def adapter(self, name: str) -> AdapterCard | None:
        """Return an adapter; None if it does not exist."""
        ...

    async def chat_templates(self, name: str) -> ChatTemplates:
        """Return an adapter's own chat templates. Loads the adapter if no engine has it."""
        ...

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        """Load an adapter from a directory on the engines' machines, on all engines."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all engines."""

    async def update_adapter(self, name: str, upload: AdapterUpload) -> UpdatedAdapter:
        """Make an upload the newest version of an adapter, on all engines."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop planning steps on all engines. Returns when no step runs. New requests wait."""

    async def resume(self) -> None:
        """Plan steps again."""

    async def health(self) -> GatewayHealth:
        """Return the health of the engines. Raises nothing."""
        ...

    async def stats(self) -> dict[str, dict[str, int | float]]:
        """Return counters and gauges by engine name, without engines that do not answer."""
        ...

    def last_stats(self) -> Mapping[str, Mapping[str, int | float]]:
        """Return what `stats` returned of connected engines at their last poll, half a second ago or less."""
        ...

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    async def token_spellings(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, str]]:
        """Return the tokens of a text: id, and spelling in the vocabulary."""
        ...

    async def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, tuple[int, int]]]:
        """Return the tokens of a text: id, and the range of its characters as (start, end)."""
        ...

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, by default with special tokens."""
        ...


# -- admission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """The authenticated client.

    owner    name for logs and fair scheduling
    key_id   name of the API key, "" for none
    admin    may load and unload adapters
    metrics  may read /metrics, which covers all owners
    """

    owner: str
    key_id: str = ""
    admin: bool = False
    metrics: bool = True


@dataclass(frozen=True)
class UsageRecord:
    """Usage of one request, created once at its end.

    time             arrival, seconds since the epoch
    model, adapter   names of the base model and of the adapter (None: base model)
    adapter_content  hash of the adapter's config and weights
    output_tokens    tokens that the gateway received from the engine, of all completions
    first_token_seconds, total_seconds   since arrival; first_token_seconds is 0 without a token
    engine_first_token_seconds, engine_total_seconds   the same by the engine's clock, since arrival there; 0 if unknown
    draft_tokens, accepted_tokens        computed drafts, and drafts that became output
    history_draft_tokens, history_accepted_tokens   the same for drafts from earlier answers; not in the usage log
    trained_draft_tokens, trained_accepted_tokens   the same for a trained draft model; not in the usage log
    engine_queue_seconds   part of engine_first_token_seconds in the engine's queue; not in the usage log
    longest_output_tokens  tokens of the longest completion; not in the usage log
    preemptions      of all completions; not in the usage log
    status           HTTP status; 499: the client disconnected. An error during a stream has the status that it would
                     have had before the stream
    error            OpenAI error code, "" for none
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
    engine_queue_seconds: float = 0.0
    longest_output_tokens: int = 0
    preemptions: int = 0


def _ignore(record: UsageRecord | None) -> None:
    """Do nothing."""


@dataclass
class Ticket:
    """An admitted request.

    headers      x-ratelimit-* headers of the response
    max_tokens   limit of each completion: the requested one or the key's, whichever is lower; None: only the model's
                 length
    finish       called exactly once when the request ends; None: it failed before an engine received it
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    finish: Callable[[UsageRecord | None], None] = _ignore


class Admission(Protocol):
    """Authenticates clients, enforces limits, and accounts for usage. No call blocks."""

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """Return the client of an Authorization header. Raises GatewayError 401."""
        ...

    def may_use(self, caller: Caller, model: str) -> bool:
        """Return whether the caller may use (and see) a model or adapter; if not, requests get 404."""
        ...

    def count(self, caller: Caller, uses_tokens: bool) -> Mapping[str, str]:
        """Count a request before its body is read. Returns x-ratelimit-* headers, unless `admit` follows.

        uses_tokens   whether `admit` follows; the request is then refused if no token is left

        Raises GatewayError 429 with Retry-After.
        """
        ...

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Ticket:
        """Reserve the tokens of a request that `count` has counted.

        prompt_tokens   exact for token ids, an estimate for text; `finish` receives the exact number
        max_tokens      limit of each of `choices` completions; None: none but the model's length
        model_len       maximum length of prompt and answer

        Raises GatewayError 429 with Retry-After.
        """
        ...


# -- observation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdmittedRequest:
    """An admitted request that generates tokens.

    headers             of the HTTP request, with lower-case names, without those with keys
    add_special_tokens  see EngineRequest
    scores              for scores: the request of each prompt, with parameters of its own
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
    scores: Sequence[ScoreRequest] = ()


@dataclass(frozen=True)
class HttpExchange:
    """A finished HTTP request of any kind.

    route        pattern of the route, "" for none
    status       499: the client disconnected before the answer was complete
    body_bytes   bytes of the response body that were sent
    model        name of the adapter or base model, if the request reached the limits of its key
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
    model: str = ""


@dataclass(frozen=True)
class FailedRequest:
    """A request with an error. `model`: name of the adapter or base model, "" if it was refused before it was known."""

    time: float
    request_id: str
    status: int
    error: str
    endpoint: str
    owner: str
    model: str


@dataclass(frozen=True)
class HistoryReport:
    """Metrics of the last day. `names`: of the numbers in each sample; `failed`: the last failed requests."""

    interval_seconds: float
    names: list[str]
    samples: list[list[float]]
    failed: list[FailedRequest]


class Observer(Protocol):
    """Receives events for metrics, access log and spans. Its calls raise nothing, and return at once if not async."""

    def on_admitted(self, request: AdmittedRequest) -> None:
        """A request was admitted."""

    def on_first_token(self, request: AdmittedRequest, seconds: float) -> None:
        """The first token arrived, `seconds` after the request."""

    def on_chunks(self, request: AdmittedRequest, prompt_index: int, chunks: list[Chunk], seconds: float) -> None:
        """Chunks of one prompt's answer arrived together, `seconds` after the previous ones or the request."""

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        """A request ended."""

    def on_http_exchange(self, exchange: HttpExchange) -> None:
        """An HTTP request of any kind ended, refused ones included."""

    async def metrics(self, engines: Engines) -> tuple[str, bytes]:
        """Return content type and body of `/metrics`."""
        ...

    async def add_sample(self, engines: Engines) -> None:
        """Add a sample to the history. Called once a minute."""

    def history(self, after: float) -> HistoryReport:
        """Return the history after a time in seconds since the epoch."""
        ...
