"""Messages between a server and its clients, and their limits. `docs/protocol.md` specifies them.

A frame is a 20-byte header (magic, protocol version, engine-instance id) and one msgpack map; its `type` names the
message.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..api.adapter_sum import MAX_PARTS, MAX_WEIGHT
from ..api.sampling_defaults import SamplingDefaults
from ..api.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_LOGPROBS, RAW_LOGPROBS
from ..api.structured_outputs import ReasoningStart
from ..processes.threads import prepare_types
from .adapter_map import AdapterEntry, Stamp

MAGIC = b"SS"
PROTOCOL_VERSION = 2
INSTANCE_BYTES = 16
NO_INSTANCE = bytes(INSTANCE_BYTES)
"""Instance id in a client's frames before `welcome`."""
HEADER_BYTES = len(MAGIC) + 2 + INSTANCE_BYTES

MAX_FRAME_BYTES = 4 << 20
MAX_PROMPT_CHARACTERS = 1 << 20
MAX_PROMPT_TOKENS = 1 << 18
MAX_CHOICES = 256
MAX_OPEN_REQUESTS = 4096
"""Limit on the unfinished requests of one connection."""
MAX_ENTRIES = 512
"""Limit on the entries of one `adapters` message."""
MAX_CHUNK_TOKENS = 256
MAX_CHUNK_LOGPROBS = 1 << 16
"""Limit on the log-probabilities of one chunk, and so on those of one token: a frame holds them."""
MAX_SCORED_RANGES = 4096
MAX_FRAME_CHUNKS = 1024
MAX_ERROR_CHARACTERS = 4096
HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 10.0
"""Silence after which a peer counts as disconnected."""

RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[!-~]+\Z")]
AdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+\Z")]
RequestAdapter = Annotated[
    str, Meta(min_length=1, max_length=139, pattern=r"^[A-Za-z0-9._-]{1,128}(@[1-9][0-9]{0,9})?\Z")
]
"""An adapter, or a version of it, such as `policy@7`."""
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
    "adapter_not_found",
    "adapter_in_use",
    "version_conflict",
    "forbidden",
    "deadline_exceeded",
    "aborted",
    "slow_reader",
    "request_failed",
    "engine_dead",
]

Constraint = Annotated[str, Meta(min_length=1, max_length=1 << 18)]


class StructuredOutputs(Struct, frozen=True, omit_defaults=True):
    """Fields of `StructuredOutputsParams`; `json`: the schema as JSON text."""

    json: Constraint | None = None
    regex: Constraint | None = None
    choice: Annotated[list[Constraint], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Constraint | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Constraint | None = None
    reasoning: ReasoningStart = "none"
    reasoning_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None


class Sampling(Struct, frozen=True, omit_defaults=True):
    """Fields of `SamplingParams`, with its defaults and meanings."""

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
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
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
    receipt: bool = False
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None


prepare_types(Sampling)


class Message(Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all messages: a map with a `type`. Unknown fields are ignored, missing fields have their defaults."""


class Call(Message, frozen=True):
    """A call or its answer. `call`: a number of the client's choice."""

    call: CallId


# -- from a client -------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True):
    """The first message on a connection."""

    client: Short = ""


class Continued(Struct, frozen=True, omit_defaults=True):
    """State of one completion on another engine: tokens, number of received code points, complete or not."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] = []
    characters: Count = 0
    finished: bool = False


class AdapterWeight(Struct, frozen=True):
    """An adapter of a sum, and its weight."""

    name: RequestAdapter
    weight: Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]


class KvPages(Struct, frozen=True, omit_defaults=True):
    """KV pages that a prefill engine holds: name of its memory, and the place there of each page of the prompt.

    cached_tokens   tokens in them that the engine had before the request
    """

    source: Short
    places: Annotated[list[Count], Meta(max_length=MAX_PROMPT_TOKENS // 64)]
    cached_tokens: Count = 0


class Submit(Message, tag="submit", frozen=True):
    """A request: exactly one of `prompt` and `prompt_token_ids`.

    add_special_tokens  add the model's special tokens to a text, such as BOS
    stream              send chunks as tokens are sampled; False: the whole answer at the end
    priority            smaller runs earlier; equal priorities are served in order of arrival
    deadline_seconds    counted from arrival; after it the request ends with `deadline_exceeded`
    continues           state of each of the n completions; the answer continues there
    owner               user of the request, if the client serves several users; owners share steps fairly
    adapter_content     required version of the adapter, as in `accepted` and `adapters`; "": any
    adapters            in place of `adapter`: a weighted sum of adapters
    scored              with `prompt_token_ids`: ascending ranges [begin, end) of tokens that earlier answers sampled;
                        `prompt_logprobs` are of these only, and tokens before them may come from the prefix cache
    prefill_only        to a prefill engine: compute the prompt's full pages and hold them until `abort`, in place of an
                        answer; `sampling` is ignored
    kv_pages            to a decode engine: pages of the prompt, from such a request. It computes those that are gone
    """

    request_id: RequestId
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    adapter: RequestAdapter | None = None
    sampling: Sampling = Sampling()
    add_special_tokens: bool = True
    stream: bool = True
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    deadline_seconds: Annotated[float, Meta(gt=0, le=86400)] | None = None
    continues: Annotated[list[Continued], Meta(max_length=MAX_CHOICES)] = []
    owner: Short = ""
    adapter_content: Short = ""
    adapters: Annotated[list[AdapterWeight], Meta(max_length=MAX_PARTS)] = []
    scored: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_SCORED_RANGES)] = []
    prefill_only: bool = False
    kv_pages: KvPages | None = None


class Abort(Message, tag="abort", frozen=True):
    """Ends requests of this connection; ids that are not open are ignored."""

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_OPEN_REQUESTS)]


class LoadAdapter(Call, tag="load_adapter", frozen=True):
    """Load an adapter from a directory on the server's machine; `replace`: also if the name exists.

    path             `sum:` and weights such as `a*0.7+b*0.3` give the name to a sum of adapters
    stamp, content   of a change that is passed on from another server; `content` is the required hash ("": any)
    """

    name: AdapterName
    path: Path
    replace: bool = False
    stamp: Stamp | None = None
    content: Short = ""


class UnloadAdapter(Call, tag="unload_adapter", frozen=True):
    """Unload an adapter without open requests. With `stamp` (see `LoadAdapter`) open requests do not matter; they end
    as usual. Those of an old version, such as `policy@3`, do not matter either.
    """

    name: RequestAdapter
    stamp: Stamp | None = None


class OpenBuffer(Call, tag="open_buffer", frozen=True):
    """Request a file of `bytes` in the socket's directory, for updates; one for each connection."""

    bytes: Annotated[int, Meta(ge=1, lt=1 << 53)]


class UpdateAdapter(Call, tag="update_adapter", frozen=True):
    """Make the tensors in the first `bytes` of a buffer the newest version of an adapter.

    token     of the buffer, which has a safetensors file with the config in its `__metadata__`
    version   above the last one; None: the last one + 1
    inflight  running requests finish with their version (pin), or go on with this one (switch)
    """

    name: AdapterName
    token: Short
    bytes: Annotated[int, Meta(ge=1, lt=1 << 53)]
    version: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    inflight: Literal["pin", "switch"] = "pin"


class ListAdapters(Call, tag="list_adapters", frozen=True):
    """Request the list of adapters, and the changes after number `after`."""

    after: Count = 0


class Tokenize(Call, tag="tokenize", frozen=True):
    """Request the token ids of a text. `add_special_tokens`: as a prompt has them; `spellings`, `offsets`: return
    these, too.
    """

    text: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
    add_special_tokens: bool = True
    spellings: bool = False
    offsets: bool = False


class Detokenize(Call, tag="detokenize", frozen=True):
    """Request the text of token ids, special tokens included unless `skip_special_tokens`."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
    skip_special_tokens: bool = False


class GetChatTemplates(Call, tag="get_chat_templates", frozen=True):
    adapter: RequestAdapter


class Pause(Call, tag="pause", frozen=True):
    """Plan no more steps until `resume`; answered when no step runs. `abort`: end all open requests with `aborted`."""

    abort: bool = False


class Resume(Call, tag="resume", frozen=True):
    """Plan steps again."""


class GetStats(Call, tag="get_stats", frozen=True):
    """Request counters and gauges."""


class GetHealth(Call, tag="get_health", frozen=True):
    """Request the server's health; needs no `hello`."""


class Beat(Message, tag="beat", frozen=True):
    """Heartbeat, in both directions."""


# -- from the server -----------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to `hello`: the served model and its limits. The frame's header has the instance id to use from now on.

    chat_template    the template without tools
    chat_templates   all templates by name, if there are others
    special_tokens   tokens that a template may insert, by name, such as `eos_token`
    dtype            of hidden states, such as `torch.bfloat16`
    logprobs_mode    of sampled tokens: raw_logprobs or processed_logprobs
    max_logprobs     largest `logprobs` and `prompt_logprobs` of a request; -1 counts as `vocabulary`
    eos_token_ids    tokens that end an answer
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
    dtype: Short = ""
    max_logprobs: Count = DEFAULT_MAX_LOGPROBS
    logprobs_mode: Short = RAW_LOGPROBS
    eos_token_ids: list[TokenId] = []


class Accepted(Message, tag="accepted", frozen=True):
    """The request is queued. `adapter_content`: the version of its adapter, "" for the base model."""

    request_id: RequestId
    prompt_tokens: Count
    adapter_content: Short = ""


class TokenLogprob(Struct, frozen=True, array_like=True):
    """One token at one position: natural log-probability, rank (1: most likely, 0: unknown, of a token that
    `logprob_token_ids` names), and bytes, which may be no whole character.
    """

    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes | None = None


class Usage(Struct, frozen=True):
    """Token counts of a request, and seconds since its arrival.

    `accepted_tokens`: drafts that became output. `history_*`, `trained_*`: drafts from earlier answers and from a
    trained draft model. `queue_seconds`: time until it left the queue. `adapter_active`: False if the base model
    answered, since the prompt lacks the aLoRA adapter's invocation.
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
    queue_seconds: float = 0.0
    adapter_active: bool = True
    preemptions: int = 0


class Chunk(Struct, frozen=True, array_like=True, gc=False):
    """New part of one completion; an array of its fields in this order, without trailing defaults.

    first            number of tokens of this completion sent before
    logprobs         for each token: the chosen one first, then the most likely ones
    usage            only in the request's last chunk
    prompt_logprobs  for the next prompt tokens (from the second on): the prompt's own first, then the most likely ones
    text_offsets     with logprobs: for each token, the index of its first character in the completion's text
    receipt          only in the request's last chunk, if it was requested
    versions         with the finish_reason: (first token, version) of each version of its adapter, if it was switched
    kv_pages         the only content of the only chunk of a request with `prefill_only` before it ends
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
    receipt: dict[str, Any] | None = None
    versions: list[tuple[int, int]] | None = None
    kv_pages: KvPages | None = None


class Chunks(Message, tag="chunks", frozen=True):
    chunks: Annotated[list[Chunk], Meta(max_length=MAX_FRAME_CHUNKS)]


class Done(Call, tag="done", frozen=True):
    """A call succeeded. `replaced`: former change of the adapter that was loaded or unloaded."""

    replaced: AdapterEntry | None = None


class Buffer(Call, tag="buffer", frozen=True):
    """Answer to `open_buffer`: an existing file to write to, and its token for `update_adapter`."""

    path: Path
    token: Short


class Updated(Call, tag="updated", frozen=True):
    """Answer to `update_adapter`. `content`: hash of its config and tensors."""

    name: AdapterName
    version: Count
    content: Short


class AdapterInfo(Struct, frozen=True):
    """One adapter. `where`: cpu means ready in host memory. `content`: hash of its config and weights. `chat_template`:
    hash of its own chat templates, "" if it has none. `invocation`: token ids from whose last occurrence in a prompt on
    an aLoRA adapter is active, empty for plain LoRA.
    """

    name: str
    rank: int
    content: str
    where: Literal["gpu", "cpu", "disk", "loading"] = "disk"
    running: int = 0
    waiting: int = 0
    chat_template: Short = ""
    invocation: list[int] = []


class Adapters(Call, tag="adapters", frozen=True):
    """Answer to `list_adapters`. `entries`: the last change of each name that changed after `after`, at most
    MAX_ENTRIES; `sequence`: number of the last one.
    """

    adapters: list[AdapterInfo]
    entries: list[AdapterEntry] = []
    sequence: Count = 0


class Tokens(Call, tag="tokens", frozen=True):
    """Answer to `tokenize`. If requested: `spellings` of each token in the vocabulary, and `offsets` in the text of
    each token's first character and of the one after its last: start, end, start, ...
    """

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
    spellings: list[str] = []
    offsets: Annotated[list[Count], Meta(max_length=2 * MAX_PROMPT_TOKENS)] = []


class Text(Call, tag="text", frozen=True):
    text: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]


class ChatTemplatesFound(Call, tag="chat_templates", frozen=True):
    """Answer to `get_chat_templates`; empty if the adapter has none."""

    chat_templates: Templates = {}
    special_tokens: SpecialTokens = {}


class Stats(Call, tag="stats", frozen=True):
    """Answer to `get_stats`: counters since the start (names end in `_total`) and gauges, by name."""

    values: dict[str, int | float]


class Health(Call, tag="health", frozen=True):
    """Answer to `get_health`. `stalled`: the GPU process sends no heartbeats, or a step is late. `phase` and `progress`
    (0..1) describe loading.
    """

    status: Literal["loading", "ok", "stalled", "draining", "dead"]
    phase: Short = ""
    progress: float = 0.0
    uptime_seconds: float = 0.0
    last_step_seconds: float = 0.0


class Error(Message, tag="error", frozen=True):
    """An error of the request or call with this id; without one, of the frame or the whole connection."""

    code: ErrorCode
    message: Annotated[str, Meta(max_length=MAX_ERROR_CHARACTERS)]
    request_id: RequestId | None = None
    call: CallId | None = None
    retry_after: float | None = None


ClientMessage = (
    Hello
    | Submit
    | Abort
    | LoadAdapter
    | UnloadAdapter
    | OpenBuffer
    | UpdateAdapter
    | ListAdapters
    | Tokenize
    | Detokenize
    | GetChatTemplates
    | Pause
    | Resume
    | GetStats
    | GetHealth
    | Beat
)
ServerMessage = (
    Welcome
    | Accepted
    | Chunks
    | Done
    | Buffer
    | Updated
    | Adapters
    | Tokens
    | Text
    | ChatTemplatesFound
    | Stats
    | Health
    | Error
    | Beat
)
