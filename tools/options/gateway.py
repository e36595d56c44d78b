"""Options that `serve` and `gateway` share: HTTP address, keys and logs."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from .engine import add_value, check_output, positive

API_KEY_VARIABLE = "SIDESTREAM_API_KEY"


def add_gateway_options(parser: argparse.ArgumentParser, keys_flags: list[str]) -> None:
    """Add the options in groups. `keys_flags`: flags of the file of API keys."""
    from ...runtime.gateway.settings import HOST, PORT

    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", default=HOST, help="address of HTTP (default: %(default)s)")
    group.add_argument("--port", type=port, default=PORT, help="HTTP port; 0: any free port (default: %(default)s)")
    group.add_argument("--api-key", metavar="KEY", help=f"the only key, with all rights (default: ${API_KEY_VARIABLE})")
    group.add_argument(*keys_flags, dest="api_keys", metavar="FILE", help="keys of `sidestream keys http`")
    group.add_argument("--insecure", action="store_true", help="answer other machines without a key")
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="origins of pages that may call the server: https://app.example, or * for all; also as a JSON list "
        "(default: pages of this machine, at any port)",
    )
    add_value(group, "--max-connections", 4096, "open connections")
    group.add_argument(
        "--connections-per-client",
        type=positive,
        metavar="N",
        help="maximum connections of one address (default: half of all, or all for this machine)",
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
    group.add_argument("--access-log", metavar="FILE", help="a line of JSON for each request; -: standard output")
    group.add_argument(
        "--metrics-compat", choices=["vllm"], help="/metrics also has vLLM's names, for existing dashboards"
    )
    group.add_argument("--otel-endpoint", metavar="URL", help="send spans to this OTLP collector (the extra `otel`)")


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
    from ...runtime.gateway.auth.keys import parse, read_bytes
    from ...runtime.gateway.metrics.tracing import check_endpoint
    from ...runtime.gateway.middleware import parse_origins
    from ...runtime.gateway.server_process import check_exposure
    from ...runtime.gateway.settings import GatewaySettings

    if options.api_key == "":
        raise ValueError("--api-key is empty, which would admit everyone; give a key, or leave the flag out")
    api_key = options.api_key if options.api_key is not None else os.environ.get(API_KEY_VARIABLE, "")
    if api_key and options.api_keys is not None:
        raise ValueError("--api-key and a file of keys exclude each other; add the key to the file with its rights")
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
        keys=options.api_keys and str(Path(options.api_keys).resolve()),
        insecure=options.insecure,
        allowed_origins=None if options.allowed_origins is None else parse_origins(options.allowed_origins),
        max_connections=options.max_connections,
        connections_per_client=options.connections_per_client,
        drain_seconds=options.drain_seconds,
        usage_log=usage_log,
        usage_days=options.usage_days,
        log_payloads=options.log_payloads,
        access_log=options.access_log,
        metrics_compat=options.metrics_compat,
        otel_endpoint=options.otel_endpoint,
    )
    check_exposure(settings)
    return settings


def _usage_log(given: str | None) -> str | None:
    """Return the path of the usage log; None if the default place cannot be written, as in many containers."""
    from ...runtime.gateway.auth.usage_database import default_path

    if given is not None:
        return None if given == "none" else str(Path(given).resolve())
    path = default_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        print(f"no usage log: {path.parent}: {error.strerror}; name a file with --usage-log", file=sys.stderr)
        return None
    return str(path)
