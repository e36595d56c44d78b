"""`fleet.toml`: the options of a fleet, checked before anything starts."""

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field, structs

from ..adapters.remote_adapter import is_remote
from ..demo_model import DEMO_MODEL, demo_adapters
from ..engine.options import read_keywords
from ..gateway.addresses import parse_hosts
from ..gateway.auth.key_store import parse as parse_keys
from ..gateway.auth.key_store import read_bytes
from ..gateway.origin_policy import parse_origins
from ..gateway.router.adapter_root import AdapterRoot
from ..gateway.server_process import check_exposure
from ..gateway.settings import GatewaySettings
from ..processes.threads import prepare_types
from ..protocol.curve_keys import load_client_keys, load_server_keys
from ..server.settings import ServeSettings
from ..text.reasoning import ReasoningFormat

MAX_FILE_BYTES = 1 << 20
_PATHS = ("model", "keys", "engine_keys", "usage_log")

Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Count = Annotated[int, Meta(ge=1, le=1000)]


class FleetOptions(Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Options of a fleet. Names in the file have dashes, and paths are relative to its directory.

    name               name of the application in Ray Serve, unique in its cluster
    model              model directory on every host; None: the demo model and its adapters, on the CPU
    served_model_name  name for clients; None: name of the directory
    lora_modules       adapter name -> directory on every host
    adapters_root      directory on every host, or URL that fsspec reads: each folder in it is an adapter
    engine             keywords of `LLM`, such as max-num-seqs
    gpus               GPUs of an engine, all on one host; None: engine.tensor-parallel-size (1), or 0 on the CPU
    cpus               CPUs that Ray reserves for an engine
    min_replicas       minimum number of engines; with 0, a request starts the first one
    max_replicas       maximum number of engines
    target_requests    open requests per engine above which Ray starts another one
    target_tokens      the same for tokens in flight (prompts and answers of open requests); None: not used
    scale_up_seconds   delay before engines are added
    idle_seconds       delay before engines are removed
    drain_seconds      time for open requests when an engine stops; unfinished ones then move to other engines
    surge_percent      additional engines during an update, in percent, which need GPUs; 0: an old engine stops first
    patience_seconds   time that a request waits for an engine to start or restart
    max_waiting        waiting requests per engine; further requests get 429
    host, port         HTTP listen address
    proxy_location     hosts that serve HTTP: EveryNode with a replica, or HeadOnly
    ingresses          processes that serve HTTP
    ingress_resources  Ray resources of each of them, such as {"stable": 1} to avoid machines that may disappear
    keys               TOML file of hashed keys (`sidestream keys http add`), on every host that serves HTTP
    insecure           serve other machines without keys
    allowed_origins    allowed CORS origins ("*": all); None: loopback origins
    allowed_hosts      allowed Host headers besides `host` and addresses ("*": all); None: no others for a loopback host
    usage_log          SQLite file of the usage log, on each host that serves HTTP; None: no log
    reasoning_parser   how reasoning is separated from content: auto, qwen3, deepseek_r1 or none
    metrics_compat     "vllm": export vLLM's metric names too
    engine_keys        directory of `sidestream keys curve`, on every host: engines use TCP; None: sockets of one host
    """

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")] = "sidestream"
    model: str | None = None
    served_model_name: str | None = None
    lora_modules: dict[str, str] = field(default_factory=dict)
    adapters_root: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    gpus: Annotated[int, Meta(ge=0, le=64)] | None = None
    cpus: Annotated[float, Meta(ge=0.0, le=1024.0)] = 1.0
    min_replicas: Annotated[int, Meta(ge=0, le=1000)] = 1
    max_replicas: Count = 1
    target_requests: Annotated[float, Meta(gt=0.0)] = 64.0
    target_tokens: Annotated[float, Meta(gt=0.0)] | None = None
    scale_up_seconds: Seconds = 5.0
    idle_seconds: Seconds = 300.0
    drain_seconds: Seconds = 30.0
    surge_percent: Annotated[int, Meta(ge=0, le=100)] = 0
    patience_seconds: Annotated[float, Meta(ge=1.0, le=3600.0)] = 300.0
    max_waiting: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    proxy_location: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    ingresses: Count = 1
    ingress_resources: dict[str, Annotated[float, Meta(ge=0.0)]] = field(default_factory=dict)
    keys: str | None = None
    insecure: bool = False
    allowed_origins: list[str] | None = None
    allowed_hosts: list[str] | None = None
    usage_log: str | None = None
    reasoning_parser: ReasoningFormat = "auto"
    metrics_compat: Annotated[str, Meta(pattern=r"\Avllm\Z")] | None = None
    engine_keys: str | None = None

    @property
    def llm(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`."""
        given = {name.replace("-", "_"): value for name, value in self.engine.items()}
        return {"device": "cpu"} | given if self.model is None else given

    @property
    def tp_size(self) -> int:
        """Tensor-parallel processes of an engine, each with its own GPU."""
        return int(self.llm.get("tensor_parallel_size") or 1)

    @property
    def on_cpu(self) -> bool:
        """Whether engines run on a CPU."""
        return self.gpus == 0 or self.llm.get("device") == "cpu"


prepare_types(FleetOptions)


def read_options(path: Path) -> FleetOptions:
    """Read a fleet's file. Raises ValueError that names the file and the key, or OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; give a fleet's TOML file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    return options_of(content, path.parent, str(path))


def options_of(content: dict[str, Any], directory: Path, where: str) -> FleetOptions:
    """Return the options of a file. `directory`: base of its relative paths. Raises ValueError."""
    content = {key.replace("_", "-"): value for key, value in content.items()}
    known = [each.encode_name for each in structs.fields(FleetOptions)]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        found = msgspec.convert(content, FleetOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    changes: dict[str, Any] = {
        name: str((directory / given).resolve()) for name in _PATHS if (given := getattr(found, name)) is not None
    }
    if found.adapters_root is not None and not is_remote(found.adapters_root):
        changes["adapters_root"] = str((directory / found.adapters_root).resolve())
    changes["lora_modules"] = {name: str((directory / each).resolve()) for name, each in found.lora_modules.items()}
    found = structs.replace(found, **changes)
    try:
        check(found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    return found


def check(options: FleetOptions) -> None:
    """Raise ValueError, TypeError or OSError if the options are inconsistent or cannot be used."""
    if options.max_replicas < options.min_replicas:
        raise ValueError(
            f"max-replicas = {options.max_replicas} is below min-replicas = {options.min_replicas}; raise the one or "
            "lower the other"
        )
    if options.model is not None and not Path(options.model, "config.json").is_file():
        raise ValueError(f"model = {options.model!r} is not a model directory: it has no config.json")
    if options.gpus == 0 and options.llm.get("device", "cpu") != "cpu":
        raise ValueError("gpus = 0 gives engines no GPU, but engine.device needs one; omit one of them")
    read_keywords(options.llm)
    if options.gpus not in (None, 0, options.tp_size):
        raise ValueError(
            f"gpus = {options.gpus}, but an engine with tensor-parallel-size = {options.tp_size} uses "
            f"{options.tp_size}; omit gpus"
        )
    if options.adapters_root is not None:
        AdapterRoot(options.adapters_root).scan()
        if options.model is not None and not options.llm.keys() >= {"max_loras", "max_lora_rank"}:
            raise ValueError(
                "the adapters of adapters-root are unknown at the start; set engine.max-loras and engine.max-lora-rank"
            )
    if options.keys is not None:
        parse_keys(read_bytes(Path(options.keys)), Path(options.keys))
    if options.engine_keys is not None:
        load_server_keys(Path(options.engine_keys, "server"))
        load_client_keys(client_keys(options.engine_keys))
    check_exposure(gateway_settings(options))


def client_keys(engine_keys: str) -> str:
    """Return the folder of client keys of the ingresses: that of the client `gateway`, or the default client."""
    own = Path(engine_keys, "client-gateway")
    return str(own if own.is_dir() else own.with_name("client-default"))


def gateway_settings(options: FleetOptions) -> GatewaySettings:
    """Return the settings of each ingress."""
    return GatewaySettings(
        host=options.host,
        port=options.port,
        engine_keys=options.engine_keys and client_keys(options.engine_keys),
        keys=options.keys,
        insecure=options.insecure,
        allowed_origins=None if options.allowed_origins is None else parse_origins(options.allowed_origins),
        allowed_hosts=None if options.allowed_hosts is None else parse_hosts(options.allowed_hosts),
        drain_seconds=options.drain_seconds,
        usage_log=options.usage_log,
        reasoning_parser=options.reasoning_parser,
        metrics_compat=options.metrics_compat,
    )


def serve_settings(options: FleetOptions) -> ServeSettings:
    """Return the settings of each engine, except its address."""
    model = str(DEMO_MODEL) if options.model is None else options.model
    adapters = options.lora_modules
    if options.model is None:
        adapters = {name: str(path) for name, path in demo_adapters().items()} | adapters
    roots = {str(Path(path).parent) for path in adapters.values()}
    if options.adapters_root is not None:
        roots.add(options.adapters_root)
    return ServeSettings(
        model=model,
        llm=options.llm,
        adapters=adapters,
        keys=options.engine_keys and str(Path(options.engine_keys, "server")),
        drain_seconds=options.drain_seconds,
        max_waiting=options.max_waiting,
        adapter_roots=sorted(roots),
        served_model_name=options.served_model_name or Path(model).name,
    )
