"""The protocol between a server and its clients: messages, limits, and their way into frames and back.
`docs/protocol.md` specifies it for other languages.

A frame is a 20-byte header (magic, protocol version, engine-instance id) and one msgpack map whose `type` names the
message. Nothing in here knows a socket.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..api.sampling_defaults import SamplingDefaults

MAGIC = b"SS"
PROTOCOL_VERSION = 2
INSTANCE_BYTES = 16
NO_INSTANCE = bytes(INSTANCE_BYTES)
"""What a client that knows no instance yet puts into its frames."""
HEADER_BYTES = len(MAGIC) + 2 + INSTANCE_BYTES

MAX_FRAME_BYTES = 4 << 20
MAX_PROMPT_CHARACTERS = 1 << 20
MAX_PROMPT_TOKENS = 1 << 18
MAX_CHOICES = 256
MAX_OPEN_REQUESTS = 4096
"""Unfinished requests of one connection."""
MAX_CHUNK_TOKENS = 256
MAX_FRAME_CHUNKS = 1024
HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 10.0
"""A peer that was silent for so long is gone."""

RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[!-~]+\Z")]
AdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+\Z")]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
CallId = Annotated[int, Meta(ge=0, lt=1 << 53)]
MAX_SHORT = 256
Short = Annotated[str, Meta(max_length=MAX_SHORT)]
Path = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*\Z")]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_TEMPLATES = 32
Template = Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)]
Templates = Annotated[dict[Short, Template], Meta(max_length=MAX_TEMPLATES)]
MAX_SPECIAL_TOKENS = 64
SpecialTokens = Annotated[dict[Short, Short], Meta(max_length=MAX_SPECIAL_TOKENS)]

ErrorCode = Literal[
    "bad_frame",
    "unsupported_version",
    "wrong_instance",
    "hello_first",
    "loading",
    "draining",
    "overloaded",
    "too_many_requests",
    "duplicate_id",
    "invalid_request",
    "unknown_adapter",
    "adapter_changed",
    "adapter_error",
    "adapter_in_use",
    "forbidden",
    "deadline_exceeded",
    "slow_reader",
    "request_failed",
    "engine_dead",
]
RETRYABLE: frozenset[str] = frozenset(
    {
        "wrong_instance",
        "hello_first",
        "loading",
        "draining",
        "overloaded",
        "too_many_requests",
        "slow_reader",
        "engine_dead",
    }
)
"""Codes after which the same request may succeed, on a fresh connection or after `retry_after` seconds."""


Constraint = Annotated[str, Meta(min_length=1, max_length=1 << 18)]


class StructuredOutputs(Struct, frozen=True, omit_defaults=True):
    """The fields of `StructuredOutputsParams` that travel; `json`: the schema as JSON text."""

    json: Constraint | None = None
    regex: Constraint | None = None
    choice: Annotated[list[Constraint], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Constraint | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Constraint | None = None


class Sampling(Struct, frozen=True, omit_defaults=True):
    """The fields of `SamplingParams` that travel, with its defaults and meanings."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] = 0
    min_p: float = 0.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = 16
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=64)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=1024)] = {}
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=256)] = []
    structured_outputs: StructuredOutputs | None = None
    skip_reading_prefix_cache: bool | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculation: Literal["off", "auto"] | Annotated[int, Meta(ge=1, le=7)] | None = None


class Message(Struct, frozen=True, tag_field="type", omit_defaults=True):
    """What every message is: a map with its `type`; unknown fields are ignored, absent ones have their defaults."""


# -- from a client -------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True):
    """The first message on a connection."""

    client: Short = ""


class Continued(Struct, frozen=True, omit_defaults=True):
    """What another engine made of one completion: its tokens, how much of their text the client has (in Unicode code
    points), and whether it is complete.
    """

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] = []
    characters: Count = 0
    finished: bool = False


class Submit(Message, tag="submit", frozen=True):
    """A request: exactly one of `prompt` and `prompt_token_ids`.

    add_special_tokens  a text gets the special tokens that the model expects at the start, such as BOS
    stream            chunks as tokens come; else the whole answer at its end
    priority          smaller runs earlier; equal ones first come, first served
    deadline_seconds  counted from arrival; the request ends with `deadline_exceeded` when it passes
    continues         what there is of each of the n completions already: the answer goes on from there
    owner             for whom the client asks, where it asks for several: steps are shared fairly between them
    adapter_content   the adapter has to be this version of it, as `accepted` and `adapters` tell it; "": any
    """

    request_id: RequestId
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    adapter: AdapterName | None = None
    sampling: Sampling = Sampling()
    add_special_tokens: bool = True
    stream: bool = True
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    deadline_seconds: Annotated[float, Meta(gt=0, le=86400)] | None = None
    continues: Annotated[list[Continued], Meta(max_length=MAX_CHOICES)] = []
    owner: Short = ""
    adapter_content: Short = ""


class Abort(Message, tag="abort", frozen=True):
    """Ends requests of this connection; ids that are not open are ignored."""

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_OPEN_REQUESTS)]


class LoadAdapter(Message, tag="load_adapter", frozen=True):
    """Makes a directory on the server's machine usable as adapter `name`; `replace`: also when the name is taken."""

    call: CallId
    name: AdapterName
    path: Path
    replace: bool = False


class UnloadAdapter(Message, tag="unload_adapter", frozen=True):
    """Forgets an adapter."""

    call: CallId
    name: AdapterName


class ListAdapters(Message, tag="list_adapters", frozen=True):
    """Asks for all adapters."""

    call: CallId


class Tokenize(Message, tag="tokenize", frozen=True):
    """Asks for a text's ids; `add_special_tokens`: as a prompt has them."""

    call: CallId
    text: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
    add_special_tokens: bool = True


class Detokenize(Message, tag="detokenize", frozen=True):
    """Asks for the text of ids, special tokens included."""

    call: CallId
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]


class GetChatTemplates(Message, tag="get_chat_templates", frozen=True):
    """Asks for the chat templates that an adapter's directory holds."""

    call: CallId
    adapter: AdapterName


class GetStats(Message, tag="get_stats", frozen=True):
    """Asks for counters and gauges."""

    call: CallId


class GetHealth(Message, tag="get_health", frozen=True):
    """Asks whether requests are served; needs no `hello`."""

    call: CallId


class Beat(Message, tag="beat", frozen=True):
    """Says that the sender is alive; goes both ways."""


# -- from the server -----------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True):
    """Answers `hello`: what is served, and its limits. The frame's header holds the instance id to use from now on.

    chat_template    the one that is used without tools
    chat_templates   all of them by name, where there are others too
    special_tokens   what a template may insert, by name, such as `eos_token`
    """

    server_version: Short
    model: Short
    vocabulary: Count
    max_model_len: Count
    max_num_seqs: Count
    max_adapter_slots: Count
    has_tokenizer: bool
    admin: bool
    chat_template: Template | None = None
    bos_token: Short = ""
    eos_token: Short = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    chat_templates: Templates = {}
    special_tokens: SpecialTokens = {}
    max_open_requests: Count = MAX_OPEN_REQUESTS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    silence_seconds: float = SILENCE_SECONDS


class Accepted(Message, tag="accepted", frozen=True):
    """The request is queued; its chunks follow. `adapter_content`: the version of its adapter that answers, "" for the
    base model.
    """

    request_id: RequestId
    prompt_tokens: Count
    adapter_content: Short = ""


class TokenLogprob(Struct, frozen=True, array_like=True):
    """One token at one position: natural logarithm of its raw probability, its rank (1 = likeliest), and its bytes,
    which may be a part of a character.
    """

    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes | None = None


class Usage(Struct, frozen=True):
    """What a request cost; seconds since arrival. `accepted_tokens`: drafts that became output, `history_*` and
    `trained_*`: of both those that came from former answers and those that a trained draft made.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    history_draft_tokens: int = 0
    history_accepted_tokens: int = 0
    trained_draft_tokens: int = 0
    trained_accepted_tokens: int = 0


class Chunk(Struct, frozen=True, array_like=True, gc=False):
    """What was added to one completion of a request; an array of its fields in this order, trailing defaults left out.

    first        how many tokens of this completion were sent before
    logprobs     for each token the chosen one first, then the likeliest
    usage        only in the request's last chunk
    prompt_logprobs  for the prompt's next tokens (from its second on) its own one first, then the likeliest
    text_offsets     with logprobs: for each token the character of the completion's text at which it begins
    """

    request_id: str
    index: int
    first: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    usage: Usage | None = None
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    text_offsets: list[int] | None = None


class Chunks(Message, tag="chunks", frozen=True):
    """Pieces of any of the connection's requests."""

    chunks: Annotated[list[Chunk], Meta(max_length=MAX_FRAME_CHUNKS)]


class Done(Message, tag="done", frozen=True):
    """A call succeeded and has nothing more to say."""

    call: CallId


class AdapterInfo(Struct, frozen=True):
    """One adapter.

    `where`: gpu, cpu (ready in host memory), disk, loading; `content`: a hash of its config and weights;
    `chat_template`: a hash of its own chat templates, "" if it has none.
    """

    name: str
    rank: int
    content: str
    where: Literal["gpu", "cpu", "disk", "loading"] = "disk"
    running: int = 0
    waiting: int = 0
    chat_template: Short = ""


class Adapters(Message, tag="adapters", frozen=True):
    """Answers `list_adapters`."""

    call: CallId
    adapters: list[AdapterInfo]


class Tokens(Message, tag="tokens", frozen=True):
    """Answers `tokenize`."""

    call: CallId
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]


class Text(Message, tag="text", frozen=True):
    """Answers `detokenize`."""

    call: CallId
    text: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]


class ChatTemplatesFound(Message, tag="chat_templates", frozen=True):
    """Answers `get_chat_templates`; none where the adapter has none."""

    call: CallId
    chat_templates: Templates = {}
    special_tokens: SpecialTokens = {}


class Stats(Message, tag="stats", frozen=True):
    """Answers `get_stats`: counters (since the start, names end in `_total`) and gauges, by name."""

    call: CallId
    values: dict[str, int | float]


class Health(Message, tag="health", frozen=True):
    """Answers `get_health`. status: loading, ok, stalled (the GPU process gives no sign of life, or a step takes far
    too long), draining, dead; `phase` and `progress` (0..1) say more while it loads.
    """

    call: CallId
    status: Literal["loading", "ok", "stalled", "draining", "dead"]
    phase: Short = ""
    progress: float = 0.0
    uptime_seconds: float = 0.0
    last_step_seconds: float = 0.0


class Error(Message, tag="error", frozen=True):
    """Something failed: the request or the call that is named, or (neither named) the frame or the whole connection."""

    code: ErrorCode
    message: Annotated[str, Meta(max_length=4096)]
    request_id: RequestId | None = None
    call: CallId | None = None
    retry_after: float | None = None


ClientMessage = (
    Hello
    | Submit
    | Abort
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Tokenize
    | Detokenize
    | GetChatTemplates
    | GetStats
    | GetHealth
    | Beat
)
ServerMessage = (
    Welcome | Accepted | Chunks | Done | Adapters | Tokens | Text | ChatTemplatesFound | Stats | Health | Error | Beat
)
