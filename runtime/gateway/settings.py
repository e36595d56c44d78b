"""What the gateway is told, as `sidestream serve` hands it to its process."""

from msgspec import Struct, field

HOST, PORT = "127.0.0.1", 8000
MAX_BODY_BYTES = 32 << 20
MAX_HEADER_BYTES = 64 << 10
BODY_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 30.0
MAX_CONNECTIONS = 4096
DRAIN_SECONDS = 30.0


class GatewaySettings(Struct, frozen=True, kw_only=True):
    """Settings of one gateway process.

    host, port               where it listens; port 0 takes a free one
    engines                  the engines' addresses
    engine_keys              this client's folder of `sidestream keys curve`; None: no CURVE
    api_key                  the one key that may ask for everything; "": none
    keys                     TOML file of hashed keys; None: none
    insecure                 listen beyond the loopback without keys
    allowed_origins          pages of these origins may call it ("*": of all); None: those that this machine serves
    max_body_bytes           larger bodies are answered with 413
    body_seconds             a body that takes longer is answered with 408
    max_connections          open connections of all clients
    connections_per_client   open connections of one address; None: half of max_connections beyond the loopback, all
                             on it
    drain_seconds            how long open answers may go on after SIGTERM
    usage_log                SQLite file of what was used; None: none
    usage_days               rows of the usage log that are older are deleted; None: none are
    log_payloads             prompts and answers go there too
    access_log               file of JSON lines, "-": standard output, None: none
    metrics_compat           "vllm": /metrics also has vLLM's names
    otel_endpoint            URL of an OTLP collector that spans go to; None: no spans
    """

    host: str = HOST
    port: int = PORT
    engines: list[str] = field(default_factory=list)
    engine_keys: str | None = None
    api_key: str = ""
    keys: str | None = None
    insecure: bool = False
    allowed_origins: list[str] | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    max_connections: int = MAX_CONNECTIONS
    connections_per_client: int | None = None
    drain_seconds: float = DRAIN_SECONDS
    usage_log: str | None = None
    usage_days: int | None = None
    log_payloads: bool = False
    access_log: str | None = None
    metrics_compat: str | None = None
    otel_endpoint: str | None = None
