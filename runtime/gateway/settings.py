"""Settings of a gateway process. `sidestream serve` sends them to it."""

from typing import Any

from msgspec import Struct, field

from ..processes.threads import prepare_types
from ..text.reasoning import ReasoningFormat

HOST, PORT = "127.0.0.1", 8000
MAX_BODY_BYTES = 32 << 20
MAX_HEADER_BYTES = 64 << 10
BODY_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 30.0
MAX_CONNECTIONS = 4096
DRAIN_SECONDS = 30.0
STREAM_KEEPALIVE_SECONDS = 10.0
PREFILL_MIN_TOKENS = 256


class GatewaySettings(Struct, frozen=True, kw_only=True):
    """Settings of one gateway process.

    host, port               listen address; port 0 picks a free port
    engines                  addresses of the engines
    prefill_engines          number of the first engines that only compute prompts
    prefill_min_tokens       prompts with fewer tokens that no decode engine has cached are not sent to a prefill engine
    engine_keys              folder of client keys from `sidestream keys curve`; None: no CURVE
    api_key                  an API key without limits; "": no key. It has all rights, unless there is an admin_key
    admin_key                an API key with all rights; api_key is then a user's key. "": none
    keys                     TOML file of hashed keys; None: no keys
    insecure                 allow a non-loopback address without keys
    allowed_origins          allowed CORS origins ("*": all); None: loopback origins
    allowed_hosts            allowed Host headers besides `host`, localhost and IP addresses ("*": all); None: no others
                             if `host` is a loopback address, otherwise all
    trusted_proxies          addresses and networks of proxies whose X-Forwarded-For names the client
    root_path                prefix of a proxy, such as "/llm": paths are served with and without it; "": none
    max_body_bytes           larger bodies get status 413
    body_seconds             slower bodies get status 408
    max_connections          open connections of all clients
    connections_per_client   open connections of one address; None: half of max_connections, or all of them for the
                             loopback
    drain_seconds            time that open responses get after SIGTERM
    stream_keepalive_seconds  a stream that sent nothing for that long sends a comment; 0: never
    usage_log                SQLite file of the usage log; None: no log
    usage_days               age at which rows of the usage log are deleted; None: never
    log_payloads             write prompts and answers to the usage log
    access_log               file of JSON lines, "-": standard output, None: no log
    reasoning_parser         how reasoning is separated from the content of answers, see `ReasoningFormat`
    force_usage              streams of completions and chats report the usage in each event, as if requested
    per_request_metrics      answers of completions and chats have `metrics`
    tokens_as_ids            log-probabilities name tokens by their ids unless a request sets that itself
    template_variables       variables of chat templates that a request's chat_template_kwargs do not set
    store_responses          responses of /v1/responses that are kept in memory; 0: none
    metrics_compat           "vllm": export vLLM's metric names too
    otel_endpoint            URL of an OTLP collector for spans; None: no spans
    model_aliases            further names of the base model
    adapters_folder          directory whose folders are adapters, which the engines follow; None: none
    adapter_versions         name -> version of the adapters in it at the start
    resolve_roots            directories and addresses from which adapters are loaded at their first request
    """

    host: str = HOST
    port: int = PORT
    engines: list[str] = field(default_factory=list)
    prefill_engines: int = 0
    prefill_min_tokens: int = PREFILL_MIN_TOKENS
    engine_keys: str | None = None
    api_key: str = ""
    admin_key: str = ""
    keys: str | None = None
    insecure: bool = False
    allowed_origins: list[str] | None = None
    allowed_hosts: list[str] | None = None
    trusted_proxies: list[str] = field(default_factory=list)
    root_path: str = ""
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    max_connections: int = MAX_CONNECTIONS
    connections_per_client: int | None = None
    drain_seconds: float = DRAIN_SECONDS
    stream_keepalive_seconds: float = STREAM_KEEPALIVE_SECONDS
    usage_log: str | None = None
    usage_days: int | None = None
    log_payloads: bool = False
    access_log: str | None = None
    reasoning_parser: ReasoningFormat = "auto"
    force_usage: bool = False
    per_request_metrics: bool = False
    tokens_as_ids: bool = False
    template_variables: dict[str, Any] = field(default_factory=dict)
    store_responses: int = 0
    metrics_compat: str | None = None
    otel_endpoint: str | None = None
    model_aliases: list[str] = field(default_factory=list)
    adapters_folder: str | None = None
    adapter_versions: dict[str, str] = field(default_factory=dict)
    resolve_roots: list[str] = field(default_factory=list)


prepare_types(GatewaySettings)
