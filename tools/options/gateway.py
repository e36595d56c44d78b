"""Options that `serve` and `gateway` share: HTTP address, keys and logs."""

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from ...runtime.processes.logs import FORMAT_VARIABLE, FORMATS, LEVEL_VARIABLE, LEVELS, configure_logging
from .engine import add_value, check_output, json_object, positive, report, seconds

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "SIDESTREAM_API_KEY", "SIDESTREAM_ADMIN_KEY"


def add_gateway_options(parser: argparse.ArgumentParser, keys_flags: list[str]) -> None:
    """Add the options in groups. `keys_flags`: flags of the file of API keys."""
    from ...runtime.gateway.settings import HOST, PORT
    from ...runtime.text.reasoning import ReasoningFormat

    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", default=HOST, help="address of HTTP (default: %(default)s)")
    group.add_argument("--port", type=port, default=PORT, help="HTTP port; 0: any free port (default: %(default)s)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the key of all clients; without --admin-key it also loads and unloads adapters (default: "
        f"${API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"the key that loads and unloads adapters and reads /metrics; --api-key then may not (default: "
        f"${ADMIN_KEY_VARIABLE})",
    )
    group.add_argument(*keys_flags, dest="api_keys", metavar="FILE", help="keys of `sidestream keys http`")
    group.add_argument("--insecure", action="store_true", help="answer other machines without a key")
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="origins of pages that may call the server: https://app.example, or * for all; also as a JSON list "
        "(default: pages of this machine, at any port)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names of this server in requests besides --host, localhost and IP addresses, or * for all (default: no "
        "others if --host is on this machine, otherwise all)",
    )
    group.add_argument(
        "--trusted-proxies",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="addresses or networks of proxies whose X-Forwarded-For names the client in logs (default: none)",
    )
    about = "path of a proxy in front, such as /llm: paths are served with and without it (default: none)"
    group.add_argument("--root-path", default="", metavar="PREFIX", help=about)
    group.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningFormat),
        default="auto",
        help="how <think>...</think> becomes reasoning_content; auto: as qwen3 if the chat template contains the tags; "
        "deepseek_r1: answers begin inside; none: it stays in the content (default: %(default)s)",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="report the usage in each event of streams of completions and chats, as if requested",
    )
    group.add_argument(
        "--enable-per-request-metrics",
        action="store_true",
        help="completions and chats with one answer report the times of its queue, first token and tokens",
    )
    group.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="log-probabilities name tokens token_id: and their ids, unless a request sets return_tokens_as_token_ids",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template that requests do not set in chat_template_kwargs, such as "
        """'{"enable_thinking": false}'""",
    )
    group.add_argument(
        "--store-responses",
        type=positive,
        default=0,
        metavar="N",
        help="keep the last N answers of /v1/responses, for previous_response_id and background (default: none)",
    )
    add_value(group, "--max-connections", 4096, "open connections")
    group.add_argument(
        "--connections-per-client",
        type=positive,
        metavar="N",
        help="maximum connections of one address (default: half of all, or all for this machine)",
    )
    about = "a stream that waits sends its head at once and a comment after so many seconds of silence; 0: never"
    add_value(group, "--stream-keepalive-seconds", 10.0, about, seconds, "S")
    group.add_argument(
        "--resolve-adapters",
        action="store_true",
        help="load an unknown adapter at its first request, from the folder of its name below an --adapter-root",
    )
    group = parser.add_argument_group("records")
    group.add_argument(
        "--usage-log",
        metavar="FILE",
        help="SQLite log for `sidestream usage`; none: no log (default: in your state directory)",
    )
    group.add_argument(
        "--usage-days", type=positive, metavar="N", help="delete its entries after N days (default: keep all)"
    )
    group.add_argument("--log-payloads", action="store_true", help="write prompts and answers to the usage log, too")
    group.add_argument(
        "--log-level",
        type=str.lower,
        choices=LEVELS,
        help="lowest level of the log on stderr (default: info; HTTP: warning)",
    )
    group.add_argument("--log-format", choices=FORMATS, help="format of the log on stderr (default: text)")
    group.add_argument("--access-log", metavar="FILE", help="a line of JSON for each request; -: standard output")
    group.add_argument(
        "--metrics-compat", choices=["vllm"], help="/metrics also has vLLM's names, for existing dashboards"
    )
    group.add_argument("--otel-endpoint", metavar="URL", help="send spans to this OTLP collector (the extra `otel`)")


def start_logging(options: argparse.Namespace, process: str) -> None:
    """Apply --log-level and --log-format to this process and those that it starts."""
    for variable, value in ((LEVEL_VARIABLE, options.log_level), (FORMAT_VARIABLE, options.log_format)):
        if value is not None:
            os.environ[variable] = value
    configure_logging(process, "warning")


def port(text: str) -> int:
    """Parse a port."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 65535")
    return value


def gateway_settings(options: argparse.Namespace) -> Any:
    """Return the options as `GatewaySettings`, without engines.

    Raises ValueError for contradictory options, and for access from other machines without keys.
    """
    from ...runtime.gateway.addresses import parse_hosts, parse_networks, parse_root_path
    from ...runtime.gateway.auth.key_store import parse, read_bytes
    from ...runtime.gateway.metrics.tracing import check_endpoint
    from ...runtime.gateway.origin_policy import parse_origins
    from ...runtime.gateway.server_process import check_exposure
    from ...runtime.gateway.settings import GatewaySettings
    from ...runtime.text.chat_renderer import check_variables

    api_key, admin_key = _keys(options)
    if options.api_keys is not None:
        parse(read_bytes(Path(options.api_keys)), Path(options.api_keys))
    usage_log = _usage_log(options.usage_log)
    if options.usage_log not in (None, "none"):
        check_output("--usage-log", Path(options.usage_log))
    if options.access_log not in (None, "-"):
        check_output("--access-log", Path(options.access_log))
    if options.otel_endpoint is not None:
        check_endpoint(options.otel_endpoint)
    if options.log_payloads and usage_log is None:
        raise ValueError("--log-payloads needs a usage log; leave --usage-log none out")
    if options.usage_days is not None and usage_log is None:
        raise ValueError("--usage-days needs a usage log; leave --usage-log none out")
    settings = GatewaySettings(
        host=options.host,
        port=options.port,
        api_key=api_key,
        admin_key=admin_key,
        keys=options.api_keys and str(Path(options.api_keys).resolve()),
        insecure=options.insecure,
        allowed_origins=None if options.allowed_origins is None else parse_origins(options.allowed_origins),
        allowed_hosts=None if options.allowed_hosts is None else parse_hosts(options.allowed_hosts),
        trusted_proxies=parse_networks(options.trusted_proxies),
        root_path=parse_root_path(options.root_path),
        max_connections=options.max_connections,
        connections_per_client=options.connections_per_client,
        drain_seconds=options.drain_seconds,
        stream_keepalive_seconds=options.stream_keepalive_seconds,
        usage_log=usage_log,
        usage_days=options.usage_days,
        log_payloads=options.log_payloads,
        access_log=options.access_log,
        reasoning_parser=options.reasoning_parser,
        force_usage=options.enable_force_include_usage,
        per_request_metrics=options.enable_per_request_metrics,
        tokens_as_ids=options.return_tokens_as_token_ids,
        template_variables=check_variables(options.default_chat_template_kwargs, "--default-chat-template-kwargs"),
        store_responses=options.store_responses,
        metrics_compat=options.metrics_compat,
        otel_endpoint=options.otel_endpoint,
    )
    check_exposure(settings)
    return settings


def _keys(options: argparse.Namespace) -> tuple[str, str]:
    """Return --api-key and --admin-key, or those of the environment. Raises ValueError if they contradict."""
    for flag, value in (("--api-key", options.api_key), ("--admin-key", options.admin_key)):
        if value == "":
            raise ValueError(f"{flag} is empty, which would admit everyone; give a key, or leave the flag out")
    api_key = options.api_key if options.api_key is not None else os.environ.get(API_KEY_VARIABLE, "")
    admin_key = options.admin_key if options.admin_key is not None else os.environ.get(ADMIN_KEY_VARIABLE, "")
    if (api_key or admin_key) and options.api_keys is not None:
        raise ValueError(
            "a file of keys excludes --api-key and --admin-key; add these keys to the file with their rights"
        )
    if admin_key and not api_key:
        raise ValueError("--admin-key needs --api-key, the users' key; --api-key alone is a key with all rights")
    if admin_key and admin_key == api_key:
        raise ValueError("--api-key and --admin-key are the same; give two keys, or --api-key alone for all rights")
    if api_key and not admin_key:
        report(
            "the API key has all rights: every client can load and unload adapters and read /metrics; "
            "add --admin-key to reserve these rights"
        )
    return api_key, admin_key


def _usage_log(given: str | None) -> str | None:
    """Return the path of the usage log; None if the default place cannot be written, as in many containers."""
    from ...runtime.gateway.auth.usage_database import default_path

    if given is not None:
        return None if given == "none" else str(Path(given).resolve())
    path = default_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        report(f"no usage log: {path.parent}: {error.strerror}; name a file with --usage-log")
        return None
    return str(path)
